"""Gives a command a bus with the whole path behind it: the running deployment's, or its own for the call."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import PATH_ROLES
from schemas.errors import NatterjackError, Unavailable
from services.cli.progress import StageDisplay
from services.runtime.bus import Bus, bus_url, open_bus
from services.runtime.generation import finish_cancelling
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from services.supervisor.pipeline import PipelineSettings
from services.supervisor.supervisor import Plan, Supervisor

REACH_TIMEOUT_S = 2.0
DEFAULT_NATS_PORT = 4222


class PathToModel:
    """Finds or starts what answers requests for the configured model."""

    def __init__(self, settings: PipelineSettings, file: Path | None, overrides: tuple[str, ...]) -> None:
        self._settings = settings
        self._file = file
        self._overrides = overrides
        self._supervisor: Supervisor | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Bus]:
        """Yield a bus on which every service of the path is ready."""
        async with contextlib.AsyncExitStack() as stack:
            bus = await self._join_running(stack)
            if bus is None:
                bus = await self._start(stack)
            stack.push_async_callback(finish_cancelling)
            yield bus

    def kill(self) -> None:
        """Kill what was started for the call."""
        if self._supervisor is not None:
            self._supervisor.kill()

    async def _join_running(self, stack: contextlib.AsyncExitStack) -> Bus | None:
        """Return the bus of a running deployment, None when there is none.

        Raises Unavailable when an external bus is configured and the path is not there: then nothing is
        started.
        """
        settings = self._settings.bus
        try:
            if settings.url is None and not await is_listening(settings):
                return None
            patient = settings.model_copy(update={"connect_timeout_s": REACH_TIMEOUT_S})
            attempt = contextlib.AsyncExitStack()
            async with attempt:
                bus = await attempt.enter_async_context(open_bus(patient, quiet_tracing(), name="cli"))
                registry = await attempt.enter_async_context(Registry(bus))
                missing = registry.missing(PATH_ROLES)
                if missing or self._settings.model.name not in registry.models():
                    raise Unavailable(f"Not ready: {', '.join(missing) or self._settings.model.name}.")
                await stack.enter_async_context(attempt.pop_all())
                return bus
        except NatterjackError:
            if settings.url is not None:
                raise
            return None

    async def _start(self, stack: contextlib.AsyncExitStack) -> Bus:
        display = stack.enter_context(StageDisplay(is_transient=True))
        own_bus = self._settings.bus.model_copy(update={"url": None, "port": 0, "store_dir": None})
        own_supervisor = self._settings.supervisor.model_copy(update={"state_dir": None})
        settings = self._settings.model_copy(update={"bus": own_bus, "supervisor": own_supervisor})
        plan = Plan(settings, self._file, self._overrides, roles=PATH_ROLES, is_temporary=True)
        self._supervisor = Supervisor(plan, display.on_event)
        deployment = await stack.enter_async_context(self._supervisor.running())
        display.settle()
        return deployment.bus


async def is_listening(settings: BusSettings) -> bool:
    """Tell whether anybody accepts connections at the configured bus."""
    parts = urlsplit(bus_url(settings).split(",")[0])
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_NATS_PORT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def quiet_tracing() -> Tracing:
    """Return a tracer that exports nothing: a person's command is not part of the deployment."""
    return Tracing(TracerProvider())
