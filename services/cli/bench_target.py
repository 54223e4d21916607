"""What `natterjack bench` measures: a deployment that runs, one that is started for the run, or any OpenAI server."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.control import PATH_ROLES, ROLES
from schemas.errors import Unavailable
from services.cli.path import REACH_TIMEOUT_S, is_listening, quiet_tracing
from services.cli.progress import StageDisplay
from services.runtime.bus import Bus, bus_url, open_bus
from services.runtime.generation import finish_cancelling
from services.runtime.registry import Registry
from services.runtime.settings import BUILTIN_BYTES, masked
from services.supervisor.pipeline import PipelineSettings
from services.supervisor.ports import reachable_host
from services.supervisor.supervisor import Plan, Supervisor

TransportName = Literal["http", "nats"]


@dataclass(frozen=True, slots=True)
class Deployed:
    """The bus of a deployment of ours, and who is on it."""

    bus: Bus
    registry: Registry


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: `http_url` unless they go over the bus; `deployed` where there is a deployment to watch."""

    http_url: str | None
    deployed: Deployed | None


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """How to find or start it. A `url` alone is any server; with an external bus configured it is a deployment's."""

    settings: PipelineSettings
    file: Path | None
    overrides: tuple[str, ...]
    url: str | None = None
    is_own: bool = False
    transport: TransportName = "http"


def deployment_overrides(engine: str | None, overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the settings that `--engine` stands for: free ports, and for echo a vocabulary without a download."""
    if engine is None:
        return ()
    given = {override.partition("=")[0].strip() for override in overrides}
    wanted = {"executor.engine": engine, "gateway.port": "0", "bus.port": "0"}
    if engine == "echo":
        wanted["model.source"] = BUILTIN_BYTES
    return tuple(f"{key}={value}" for key, value in wanted.items() if key not in given)


class TargetFinder:
    """Opens a target; `kill` ends at once what was started for it."""

    def __init__(self, choice: TargetChoice) -> None:
        self._choice = choice
        self._supervisor: Supervisor | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Target]:
        """Yield the target when it is ready; raises Unavailable, DeploymentError."""
        choice = self._choice
        async with contextlib.AsyncExitStack() as stack:
            if choice.is_own:
                yield await self._start(stack)
            elif choice.url is not None and choice.settings.bus.url is None:
                yield Target(choice.url, None)
            else:
                gateway = choice.settings.gateway
                url = choice.url or f"http://{reachable_host(gateway.host)}:{gateway.port}"
                yield Target(url, await self._join(stack))

    def kill(self) -> None:
        """Kill what was started."""
        if self._supervisor is not None:
            self._supervisor.kill()

    async def _join(self, stack: contextlib.AsyncExitStack) -> Deployed:
        settings = self._choice.settings.bus
        if not await is_listening(settings):
            raise Unavailable(
                f"Nothing answers at {masked(bus_url(settings))}: start a deployment with 'natterjack up', have one "
                "started for the run with --engine, or name a server with --url."
            )
        patient = settings.model_copy(update={"connect_timeout_s": REACH_TIMEOUT_S})
        bus = await stack.enter_async_context(open_bus(patient, quiet_tracing(), name="bench"))
        registry = await stack.enter_async_context(Registry(bus))
        stack.push_async_callback(finish_cancelling)
        await registry.wait_ready(PATH_ROLES, REACH_TIMEOUT_S)
        return Deployed(bus, registry)

    async def _start(self, stack: contextlib.AsyncExitStack) -> Target:
        choice = self._choice
        display = stack.enter_context(StageDisplay(is_transient=True))
        own_bus = choice.settings.bus.model_copy(update={"url": None, "store_dir": None})
        own_supervisor = choice.settings.supervisor.model_copy(update={"state_dir": None})
        settings = choice.settings.model_copy(update={"bus": own_bus, "supervisor": own_supervisor})
        roles = ROLES if choice.transport == "http" else PATH_ROLES
        plan = Plan(settings, choice.file, choice.overrides, roles=roles, is_temporary=True)
        self._supervisor = Supervisor(plan, display.on_event)
        deployment = await stack.enter_async_context(self._supervisor.running())
        display.settle()
        stack.push_async_callback(finish_cancelling)
        return Target(deployment.http_url, Deployed(deployment.bus, deployment.registry))
