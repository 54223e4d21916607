"""The life of a service, the same for all: connect → start → ready → (signal) → drain → stop.

A service is an object with `start`, `drain` and `stop`; everything around it (bus, telemetry, registry entry, signals,
exit code) is here. It is registered as ready only after its subscriptions have reached the server.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue

from schemas.control import ConfigValue, EffectiveConfig, Registration, Role
from schemas.errors import NatterjackError, Unavailable
from schemas.subjects import subject_token
from services.runtime.build_facts import build_facts
from services.runtime.bus import Bus, open_bus
from services.runtime.console_feed import ConsoleFeed
from services.runtime.control import Arguments, Command, ControlServer
from services.runtime.kept_traces import share_kept_traces
from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page
from services.runtime.otlp_metrics import pushing_metrics
from services.runtime.probe_server import Page, Pages, probe_server
from services.runtime.registry import Heartbeat, Registry
from services.runtime.settings import (
    CommonSettings,
    Loaded,
    SettingsError,
    TelemetrySettings,
    load_settings,
    masked,
)
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing, resource_of, setup_telemetry

log = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_FAILED, EXIT_CONFIGURATION, EXIT_BUS = 0, 1, 2, 3
DRAIN_TIMEOUT_S = 10.0

S = TypeVar("S", bound=CommonSettings)


class StartFailed(Exception):
    """A service cannot start; the message tells a person why and what to do."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a service is given: the bus, the tracer, the registry view, its own registry entry and its metrics."""

    bus: Bus
    tracing: Tracing
    registry: Registry
    heartbeat: Heartbeat
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def instance(self) -> str:
        """This instance's name, stable over restarts."""
        return self.heartbeat.registration.instance

    @property
    def incarnation(self) -> str:
        """This life of the instance."""
        return self.heartbeat.registration.incarnation

    def progress(self, stage: str, fraction: float = 0.0, detail: str = "") -> None:
        """Tell whoever watches the registry what the start is doing."""
        self.heartbeat.update(stage=stage, progress=round(fraction, 3), detail=detail)


class Service(Protocol):
    """One service's own part of its life."""

    async def start(self) -> None:
        """Load, subscribe; return when requests can be served."""

    async def wait(self) -> None:
        """Return or raise when the service can no longer work; else run for ever."""

    async def drain(self) -> None:
        """Take nothing new; finish or hand over what runs."""

    async def stop(self) -> None:
        """Release everything."""

    def commands(self) -> Mapping[str, Command]:
        """Return what an operator may ask of this service alone, by the command's name."""


def run(
    role: Role, settings_kind: type[S], build: Callable[[S, Context], Service], argv: Sequence[str] | None = None
) -> int:
    """Run a service until a signal stops it; returns the process's exit code."""
    options = _options(role, argv)
    instance = options.instance or f"{role}-{uuid.uuid4().hex[:6]}"
    try:
        loaded = load_settings(settings_kind, file=options.config, overrides=options.set)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIGURATION
    tracing = setup_telemetry(loaded.settings.telemetry, service=role, instance=instance)
    try:
        _run_loop(_serve(role, instance, loaded, tracing, build))
    except (Unavailable, StartFailed, NatterjackError) as error:
        log.error("%s", error)
        return EXIT_BUS if isinstance(error, Unavailable) else EXIT_FAILED
    except Exception:
        log.exception("%s failed", instance)
        return EXIT_FAILED
    finally:
        tracing.close()
    return EXIT_STOPPED


def _run_loop(main: Coroutine[None, None, None]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def _options(role: Role, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"natterjack serve {role}", description=f"Run one {role} service.")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="pipeline file (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    parser.add_argument("--instance", metavar="NAME", help="this instance's name; must be unique")
    return parser.parse_args(argv)


async def _serve(
    role: Role,
    instance: str,
    loaded: Loaded[S],
    tracing: Tracing,
    build: Callable[[S, Context], Service],
) -> None:
    settings = loaded.settings
    stopping = _stop_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics(settings.model.name)
        opening = open_bus(settings.bus, tracing, name=instance, metrics=metrics)
        connecting = asyncio.create_task(stack.enter_async_context(opening))
        if not await _finished_before(stopping, connecting):
            return
        bus = connecting.result()
        await ensure_streams(bus.transport, bus.subjects, settings.bus)
        heartbeat = Heartbeat(bus, _registration(role, instance, settings))
        heartbeat.start()
        stack.push_async_callback(heartbeat.leave)
        _measure_process(metrics, bus, heartbeat.registration)
        await _serve_probes(stack, settings.telemetry, _pages(bus, heartbeat, metrics))
        resource = resource_of(role, instance)
        await stack.enter_async_context(pushing_metrics(settings.telemetry, metrics, resource))
        registry = await stack.enter_async_context(Registry(bus))
        feed = ConsoleFeed(bus, heartbeat.registration, registry, metrics, with_spans=settings.telemetry.console_spans)
        await stack.enter_async_context(feed)
        await share_kept_traces(bus, tracing)
        await _publish_config(bus, heartbeat.registration, loaded)
        service = build(settings, Context(bus, tracing, registry, heartbeat, metrics))
        await _live(service, bus, heartbeat, stopping)


async def _serve_probes(stack: contextlib.AsyncExitStack, settings: TelemetrySettings, pages: Pages) -> None:
    if settings.metrics_port is None:
        return
    host, port = settings.metrics_host, settings.metrics_port
    try:
        port = await stack.enter_async_context(probe_server(host, port, pages))
    except OSError as error:
        raise StartFailed(
            f"Cannot serve probes and metrics on {host} port {port}: {error.strerror or error}. "
            "Choose another one with --set telemetry.metrics_port=PORT (0: any free one)."
        ) from None
    log.info("serving probes and metrics on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def _measure_process(metrics: Metrics, bus: Bus, registration: Registration) -> None:
    state = bus.transport.state
    metrics.gauge("bus_connected", lambda: state.is_connected)
    metrics.gauge("bus_reconnects_total", lambda: state.num_reconnects)
    metrics.gauge("build_info", lambda: 1, registration.role, registration.version, registration.instance)


def _pages(bus: Bus, heartbeat: Heartbeat, metrics: Metrics) -> Pages:
    def ready(accept: str) -> Page:
        state = heartbeat.registration.state if bus.transport.state.is_connected else "disconnected from the bus"
        return Page(f"{state}\n".encode(), 200 if state == "ready" else 503)

    return {
        "/health": lambda accept: Page(b"ok\n"),
        "/ready": ready,
        "/metrics": lambda accept: Page.of(*metrics_page(metrics, accept)),
    }


async def _live(service: Service, bus: Bus, heartbeat: Heartbeat, stopping: asyncio.Event) -> None:
    """Start, run until a signal or a failure, drain, stop; a signal during the start ends that too."""
    try:
        if not await _finished_before(stopping, asyncio.create_task(service.start())):
            return
        await bus.transport.flush()
        heartbeat.update(state="ready", stage="ready", progress=1.0, detail="")
        log.info("ready")
        async with ControlServer(bus, heartbeat.registration, {**_commands(stopping), **service.commands()}):
            await _finished_before(stopping, asyncio.create_task(service.wait()))
        await heartbeat.announce(state="draining", stage="draining")
        await _drain(service)
    except (StartFailed, NatterjackError) as error:
        await heartbeat.announce(state="failed", detail=str(error))  # so that the supervisor can name the cause
        raise
    finally:
        await service.stop()


def _commands(stopping: asyncio.Event) -> dict[str, Command]:
    """What every service can be told."""

    async def drain(arguments: Arguments) -> dict[str, JsonValue]:
        """What SIGTERM does: hand over, leave, exit; whoever keeps the process starts it again."""
        asyncio.get_running_loop().call_soon(stopping.set)  # once the answer is on its way
        return {"state": "draining"}

    return {"drain": drain}


async def _finished_before(stopping: asyncio.Event, task: "asyncio.Task[Any]") -> bool:
    """Wait for `task`, and raise what it raised; False when `stopping` came first, and then the task is cancelled."""
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.wait({task})


async def _drain(service: Service) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            await service.drain()
    except TimeoutError:
        log.warning("drain took longer than %g s; what is left is taken over by others", DRAIN_TIMEOUT_S)


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _registration(role: Role, instance: str, settings: CommonSettings) -> Registration:
    return Registration(
        instance=instance,
        incarnation=uuid.uuid4().hex,
        role=role,
        model=settings.model.name,
        state="starting",
        stage="connecting",
        pid=os.getpid(),
        host=socket.gethostname(),
        version=version(),
        started_s=time.time(),
        heartbeat_s=settings.bus.heartbeat_s,
        silent_after_s=settings.bus.silent_after_s,
    )


async def _publish_config(bus: Bus, registration: Registration, loaded: Loaded[S]) -> None:
    values = {
        key: ConfigValue(value=value, source=loaded.sources.get(key, "default"))
        for key, value in masked(loaded.settings).items()
    }
    effective = EffectiveConfig(
        instance=registration.instance,
        incarnation=registration.incarnation,
        version=registration.version,
        values=values,
        build=build_facts(),
    )
    await bus.kv_put(bus.subjects.config, subject_token(registration.instance), effective)


def version() -> str:
    """Return the installed package's version."""
    try:
        return metadata.version("natterjack")
    except metadata.PackageNotFoundError:
        return "0+unknown"
