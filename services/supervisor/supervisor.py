"""A deployment on this machine, from the free ports to the last stopped child: start → ready → stop.

Order: state directory → nats-server and model file → all services at once → ready. Leaving the block,
however, stops every child; a child that this process cannot stop any more is killed by the kernel when this
process dies.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import ROLES, Registration, Role
from schemas.errors import NatterjackError
from services.runtime.bus import Bus, open_bus
from services.runtime.registry import Registry
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing
from services.supervisor.child import Program
from services.supervisor.events import DeploymentError, OnEvent, PortTaken
from services.supervisor.keeper import Keeper, Probe
from services.supervisor.minders import Minders
from services.supervisor.model_fetch import fetch_model
from services.supervisor.nats_server import NatsServer
from services.supervisor.pipeline import PipelineSettings
from services.supervisor.ports import check_port_free, free_port, reachable_host
from services.supervisor.programs import STOP_ORDER, role_of, service_programs
from services.supervisor.service_probe import ServiceProbe
from services.supervisor.settings import SupervisorSettings
from services.supervisor.sightings import Sightings
from services.supervisor.state_dir import StateDir, default_path, hold_state_dir, temporary_state_dir

LISTEN_S = 2.5
"""Long enough to hear any living service beat."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: the validated settings, where they came from (children read them again), and which roles.

    `is_temporary`: streams and logs go to a directory that is removed at the end.
    """

    settings: PipelineSettings
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ROLES
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running deployment: all services that requests need are ready; a console, if there is one, will soon be."""

    bus_url: str
    http_url: str | None
    state: StateDir
    bus: Bus
    registry: Registry
    console_url: str | None = None


class Supervisor:
    """Runs one deployment; `running` is its life, `kill` the emergency exit."""

    def __init__(self, plan: Plan, on_event: OnEvent) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._on_event = on_event
        self._keepers: list[Keeper] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Deployment]:
        """Start everything, and yield when every service is ready; raise DeploymentError with the cause.

        A deployment that fails later cancels the block, and then raises.
        """
        async with contextlib.AsyncExitStack() as stack:
            state = stack.enter_context(self._hold_state())
            stack.push_async_callback(self._stop_all)
            minders = await stack.enter_async_context(Minders())
            yield await self._start(stack, minders, state)

    def kill(self) -> None:
        """Kill every child at once."""
        for keeper in self._keepers:
            keeper.kill()

    def _hold_state(self) -> contextlib.AbstractContextManager[StateDir]:
        chosen, bus = self._settings.supervisor.state_dir, self._settings.bus
        if chosen is None and (self._plan.is_temporary or (bus.url is None and bus.port == 0)):
            return temporary_state_dir()
        return hold_state_dir(chosen or default_path(bus))

    async def _start(self, stack: contextlib.AsyncExitStack, minders: Minders, state: StateDir) -> Deployment:
        http_url, overrides = self._choose_http()
        console = self._choose_console()
        server = self._embedded_server(state)
        model = minders.create_task(self._fetch_model())
        if server is not None:
            keeper = self._keep(minders, server.program(), server, state)
            await _wait_ready([keeper])
        bus_url = server.url if server else self._settings.bus.url or ""
        bus, registry, sightings = await self._join(stack, bus_url)
        if server is None:
            await self._check_alone(registry)
        await model
        deadlines = self._settings.supervisor.deadlines
        needed = tuple(role for role in self._plan.roles if role != "console")
        await _wait_ready(
            [
                self._keep(minders, program, ServiceProbe(program.name, sightings, deadlines), state)
                for program in self._programs(needed, overrides, bus_url)
            ]
        )
        if console is None:
            return Deployment(bus_url, http_url, state, bus, registry)
        console_url, console_port = console
        for program in self._programs(("console",), (*overrides, console_port), bus_url):
            self._keep(minders, program, ServiceProbe(program.name, sightings, deadlines), state, is_needed=False)
        return Deployment(bus_url, http_url, state, bus, registry, console_url)

    def _programs(self, roles: Sequence[Role], overrides: Sequence[str], bus_url: str) -> list[Program]:
        return service_programs(self._settings, roles, file=self._plan.file, overrides=overrides, bus_url=bus_url)

    def _choose_http(self) -> tuple[str | None, Sequence[str]]:
        """Return the gateway's URL, and the overrides with its port fixed: it must survive a restart."""
        if "gateway" not in self._plan.roles:
            return None, self._plan.overrides
        gateway = self._settings.gateway
        check_port_free(gateway.host, gateway.port, "gateway.port")
        port = gateway.port or free_port(gateway.host, "gateway.port")
        return f"http://{reachable_host(gateway.host)}:{port}", (*self._plan.overrides, f"gateway.port={port}")

    def _choose_console(self) -> tuple[str, str] | None:
        """Return the page's URL and the override that fixes its port; a taken one is no reason to start nothing."""
        console = self._settings.console
        if "console" not in self._plan.roles or not console.enabled:
            return None
        try:
            check_port_free(console.host, console.port, "console.port")
            port = console.port or free_port(console.host, "console.port")
        except PortTaken:
            port = free_port(console.host, "console.port")
        return f"http://{reachable_host(console.host)}:{port}/console", f"console.port={port}"

    def _embedded_server(self, state: StateDir) -> NatsServer | None:
        bus = self._settings.bus
        if bus.url is not None:
            return None
        check_port_free(bus.host, bus.port, "bus.port")
        return NatsServer(bus, self._settings.supervisor, state)

    async def _fetch_model(self) -> None:
        if {"tokenizer", "executor"} & set(self._plan.roles):
            stall_s = self._settings.supervisor.deadlines.download_stall_s
            await fetch_model(self._settings.model, stall_s, self._on_event)

    def _keep(
        self, minders: Minders, program: Program, probe: Probe, state: StateDir, *, is_needed: bool = True
    ) -> Keeper:
        settings = self._settings.supervisor
        keeper = Keeper(
            program,
            probe,
            settings.restarts,
            state.logs,
            self._on_event,
            silence_limit_s=_silence_limit_s(settings, probe),
        )
        self._keepers.append(keeper)
        minders.create_task(keeper.keep() if is_needed else _keep_if_possible(keeper))
        return keeper

    async def _join(self, stack: contextlib.AsyncExitStack, bus_url: str) -> tuple[Bus, Registry, Sightings]:
        settings = self._settings.bus.model_copy(update={"url": bus_url})
        sightings = Sightings()

        def heard(registration: Registration | None, instance: str) -> None:
            if registration is not None:
                sightings.heard(registration, time.monotonic())

        try:
            bus = await stack.enter_async_context(open_bus(settings, Tracing(TracerProvider()), name="supervisor"))
            await ensure_streams(bus.transport, bus.subjects, settings)
            registry = await stack.enter_async_context(Registry(bus))
        except NatterjackError as error:
            raise DeploymentError(str(error)) from None
        registry.listen(heard)
        return bus, registry, sightings

    async def _check_alone(self, registry: Registry) -> None:
        """Raise DeploymentError when services with our instances' names live on an external bus already."""
        heard: list[str] = []
        registry.listen(lambda registration, instance: heard.append(instance) if registration else None)
        if any(entry.registration.role in self._plan.roles for entry in registry.entries()):
            await asyncio.sleep(LISTEN_S)
        taken = sorted(name for name in set(heard) if role_of(name) in self._plan.roles)
        if taken:
            raise DeploymentError(
                f"On this bus, prefix '{self._settings.bus.prefix}' is in use by running services "
                f"({', '.join(taken)}). Stop them, or give this deployment another bus.prefix."
            )

    async def _stop_all(self) -> None:
        """Stop the gateway, then the services behind it, then the bus."""
        grace_s = self._settings.supervisor.shutdown_grace_s
        rest = list(self._keepers)
        for roles in STOP_ORDER:
            wave = [keeper for keeper in rest if role_of(keeper.program.name) in roles]
            await asyncio.gather(*(keeper.stop(grace_s) for keeper in wave))
            rest = [keeper for keeper in rest if keeper not in wave]
        await asyncio.gather(*(keeper.stop(grace_s) for keeper in rest))


async def _keep_if_possible(keeper: Keeper) -> None:
    """Without this program the deployment goes on; why it failed has been told as an event."""
    with contextlib.suppress(DeploymentError):
        await keeper.keep()


def _silence_limit_s(settings: SupervisorSettings, probe: Probe) -> float:
    is_server = isinstance(probe, NatsServer)
    return settings.nats_server.health_timeout_s if is_server else settings.heartbeat_timeout_s


async def _wait_ready(keepers: Sequence[Keeper]) -> None:
    for keeper in keepers:
        await keeper.ready.wait()
