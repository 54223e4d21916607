"""Runs one service alone, as its process would, over a bus in memory: what a stage replay feeds and listens to.

Settings are the recorded deployment's, where the person who replays has said nothing else.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from schemas.control import ConfigValue, EffectiveConfig, Registration, Role
from schemas.subjects import Subjects, subject_token
from services.recording.capture_file import Capture, CaptureError
from services.recording.message_kinds import message_of
from services.runtime.bus import Bus
from services.runtime.memory_transport import MemoryServer
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context, StartFailed
from services.runtime.settings import BusSettings, CommonSettings, SettingsError, load_settings
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing

MAX_PAYLOAD_BYTES = 64 << 20
"""Whatever a real bus let pass passes here."""
FOREVER_S = 1e9
SHARED_SECTION = "model."
NOT_OURS = frozenset({"model.cache_dir"})
"""Where the recorded machine kept its files says nothing about this one."""


class StageService(Protocol):
    """The part of a service's life that a replay goes through."""

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=CommonSettings)
L = TypeVar("L", bound=StageService)


@dataclass(frozen=True, slots=True)
class RecordedInstances:
    """Who took part in a recording: every instance's first configuration, and the executors' registrations."""

    configs: Mapping[str, EffectiveConfig]
    executors: Mapping[str, Registration]


def read_instances(capture: Capture) -> RecordedInstances:
    """Return what a recording says of its instances; empty where it was filtered."""
    configs: dict[str, EffectiveConfig] = {}
    executors: dict[str, Registration] = {}
    for captured in capture.messages():
        if captured.schema is None:
            continue
        if (config := message_of(captured, EffectiveConfig)) is not None:
            configs.setdefault(config.instance, config)
        elif (registration := message_of(captured, Registration)) is not None and registration.capacity is not None:
            executors.setdefault(registration.instance, registration)
    return RecordedInstances(configs, executors)


def stage_settings(
    kind: type[S], role: Role, file: Path | None, overrides: Iterable[str], recorded: Mapping[str, Any]
) -> S:
    """Return a service's settings: file, environment and overrides win over what `recorded` gives by dotted key.

    Raises SettingsError.
    """
    overrides = tuple(overrides)
    given = load_settings(kind, file=file, overrides=overrides)
    shown = given.shown()
    kept = [
        f"{key}={_as_text(value)}"
        for key, value in recorded.items()
        if key in shown and shown[key].source == "default" and shown[key].value != value and key not in NOT_OURS
    ]
    return load_settings(kind, file=file, overrides=(*kept, *overrides)).settings


def recorded_values(instances: RecordedInstances, role: Role) -> dict[str, Any]:
    """Return what instances of a role ran with, by dotted key: the model and the role's own section."""
    own = f"{role}."
    for config in instances.configs.values():
        if any(key.startswith(own) for key in config.values):
            return {key: item.value for key, item in config.values.items() if _concerns(key, own, item)}
    return {}


def _concerns(key: str, own: str, item: ConfigValue) -> bool:
    return key.startswith((own, SHARED_SECTION)) and item.value is not None


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Stage:
    """A bus in memory with one deployment's streams, on which services can be started one by one."""

    server: MemoryServer
    subjects: Subjects
    tracing: Tracing

    def connect(self) -> Bus:
        """Return a new connection."""
        return Bus(self.server.connect(), self.subjects, self.tracing)

    async def introduce(self, registration: Registration) -> None:
        """Let the services believe in an instance that is not here, for as long as the stage stands."""
        lasting = registration.model_copy(update={"state": "ready", "heartbeat_s": FOREVER_S})
        await self.connect().kv_put(self.subjects.registry, subject_token(registration.instance), lasting)

    @contextlib.asynccontextmanager
    async def running(
        self, role: Role, instance: str, settings: S, build: Callable[[S, Context], L]
    ) -> AsyncIterator[L]:
        """Run one service while the block runs; raises CaptureError with the cause when it cannot start."""
        bus = self.connect()
        registration = Registration(
            instance=instance, incarnation="replay", role=role, model=settings.model.name, state="starting"
        )
        async with Registry(bus) as registry:
            service = build(settings, Context(bus, self.tracing, registry, Heartbeat(bus, registration)))
            try:
                await service.start()
                yield service
            except StartFailed as error:
                raise CaptureError(f"The {role} cannot start here: {error}") from None
            finally:
                await service.stop()

    def forget(self, stream: str, subject: str) -> None:
        """Drop what a stream holds of one subject: a long recording would fill the memory, and slow every append."""
        held = self.server.stream(stream)
        for message in held.of_subject(subject):
            held.remove(message.sequence)


@contextlib.asynccontextmanager
async def open_stage(prefix: str) -> AsyncIterator[Stage]:
    """Yield a stage for a deployment of this prefix."""
    from services.cli.path import quiet_tracing

    server = MemoryServer(max_payload=MAX_PAYLOAD_BYTES)
    stage = Stage(server, Subjects(prefix), quiet_tracing())
    await ensure_streams(stage.connect().transport, stage.subjects, BusSettings(prefix=prefix))
    yield stage


def usable_settings(kind: type[S], role: Role, file: Path | None, overrides: Iterable[str], recorded: Any) -> S:
    """Return `stage_settings`; raises CaptureError where a recorded value means nothing to this version."""
    try:
        return stage_settings(kind, role, file, overrides, recorded)
    except SettingsError as error:
        raise CaptureError(f"The {role} cannot be configured as it was recorded: {error}") from None
