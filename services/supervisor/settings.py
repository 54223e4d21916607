"""The supervisor's settings: deadlines, restarts, priorities, and the embedded nats-server."""

from pathlib import Path

from pydantic import Field

from services.runtime.settings import CommonSettings, Seconds, Section

MIB = 1 << 20


class DeadlineSettings(Section):
    """How long each stage of the start may take; passing one ends the start and names the cause."""

    bus_s: Seconds = Field(default=15.0, description="the embedded nats-server answers")
    download_stall_s: Seconds = Field(default=60.0, description="a model download without any progress")
    connect_s: Seconds = Field(default=30.0, description="a service's process begins and reaches the bus")
    load_s: Seconds = Field(default=300.0, description="a service loads what it needs, such as the model")
    warm_up_s: Seconds = Field(default=300.0, description="a service makes itself fast, such as compiling kernels")


class RestartSettings(Section):
    """How a service that died is started again: after a growing pause, and not more often than `limit`."""

    initial_s: Seconds = Field(default=0.2, description="first pause; it doubles with each further restart")
    max_s: Seconds = Field(default=10.0, description="longest pause")
    limit: int = Field(
        default=8, ge=0, description="restarts of one instance within `window_s`; more end the deployment"
    )
    window_s: Seconds = Field(default=300.0, description="period that `limit` counts in")


class NatsServerSettings(Section):
    """The embedded nats-server."""

    max_payload_bytes: int = Field(
        default=8 * MIB, ge=64 * 1024, le=8 * MIB, description="largest message, at most 8 MiB"
    )
    max_store_bytes: int = Field(default=8 << 30, ge=64 * MIB, description="disk that streams may take")
    max_memory_bytes: int = Field(default=256 * MIB, ge=MIB, description="memory that memory streams may take")
    write_deadline_s: Seconds = Field(default=10.0, description="a client that does not read for so long is cut off")
    health_timeout_s: Seconds = Field(
        default=10.0, description="a server that does not answer for so long is killed and restarted"
    )


class SupervisorSettings(Section):
    """One machine's processes."""

    state_dir: Path | None = Field(
        default=None, description="streams and logs; null: $XDG_STATE_HOME/natterjack/PREFIX-PORT"
    )
    deadlines: DeadlineSettings = DeadlineSettings()
    restarts: RestartSettings = RestartSettings()
    nats_server: NatsServerSettings = NatsServerSettings()
    heartbeat_timeout_s: Seconds = Field(
        default=3.0,
        description="a service that was ready and is silent for so long is killed and restarted; one that starts gets "
        "four times as long",
    )
    shutdown_grace_s: Seconds = Field(default=10.0, description="time to finish after SIGTERM, before SIGKILL")
    nice: int = Field(default=10, ge=0, le=19, description="niceness of everything but the executor, which has 0")


class Settings(CommonSettings):
    """Everything that the supervisor reads."""

    supervisor: SupervisorSettings = SupervisorSettings()
