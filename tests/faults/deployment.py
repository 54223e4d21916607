"""A deployment made of single processes, each of which a fault can hit: started, hit, and started again if it died.

Stands in for an orchestrator: whatever ends without being told to is started again after a short pause.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import ROLES, Role
from schemas.output import OutputChunk
from services.runtime import launcher
from services.runtime.bus import Bus, open_bus
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.conftest import NatsServer
from tests.faults.network import Network
from tests.integration.conftest import free_port

RESTART_PAUSE_S = 0.2
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
ECHO = ("executor.engine=echo", "model.source=builtin:bytes", "executor.num_blocks=4096", "executor.step_time_s=0.01")
REPLICAS: dict[Role, int] = {"tokenizer": 2, "scheduler": 2, "cache_manager": 2, "executor": 2, "gateway": 2}


@dataclass
class Instance:
    """One service over all its lives, and its way to the broker."""

    name: str
    role: Role
    argv: list[str]
    log: Path
    network: Network
    http_url: str
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    num_starts: int = 0

    async def keep(self) -> None:
        """Run until cancelled, again whenever it ends."""
        while True:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *launcher.wrap(self.argv), stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
                )
            self.num_starts += 1
            await self.process.wait()
            await asyncio.sleep(RESTART_PAUSE_S)

    @property
    def pid(self) -> int:
        """The process of this life."""
        return self.process.pid if self.process is not None else 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this life of the service."""
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, number)

    async def stop(self) -> None:
        """End for good."""
        if self.keeper is not None:
            self.keeper.cancel()
        if self.process is not None and self.process.returncode is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.process.wait()
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self.process.wait()


@dataclass
class Deployment:
    """A broker, the services, and a client's connection to them."""

    directory: Path
    overrides: tuple[str, ...] = ECHO
    replicas: dict[Role, int] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    broker_directory: Path | None = None

    async def __aenter__(self) -> "Deployment":
        self.directory.mkdir(parents=True, exist_ok=True)
        self.broker = NatsServer(self.broker_directory or self.directory, options='http: "127.0.0.1:-1"')
        self.broker.start()
        for role in ROLES:
            for number in range(self.replicas.get(role, 1)):
                await self._start(role, f"{role}-{number}")
        self._bus = open_bus(BusSettings(url=self.broker.url), Tracing(TracerProvider()), name="client")
        self.bus: Bus = await self._bus.__aenter__()
        self.registry = await Registry(self.bus).__aenter__()
        await self.registry.wait_ready(ROLES, READY_TIMEOUT_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.registry.__aexit__(None, None, None)
        await self._bus.__aexit__(None, None, None)
        await asyncio.gather(*(instance.stop() for instance in self.instances.values()))
        for instance in self.instances.values():
            await instance.network.close()
        self.broker.kill()

    async def _start(self, role: Role, name: str) -> None:
        network, http_port = Network(self.broker.port), free_port()
        await network.open()
        overrides = [*self.overrides, f"bus.url=nats://127.0.0.1:{network.port}", f"gateway.port={http_port}"]
        options = [argument for override in overrides for argument in ("--set", override)]
        argv = [sys.executable, "-P", "-m", f"services.{role}", *options, "--instance", name]
        instance = self.instances[name] = Instance(
            name, role, argv, self.directory / f"{name}.log", network, f"http://127.0.0.1:{http_port}"
        )
        instance.keeper = asyncio.create_task(instance.keep())

    def of(self, role: Role) -> list[Instance]:
        """Return the instances of a role."""
        return [instance for instance in self.instances.values() if instance.role == role]

    def driving_scheduler(self) -> str:
        """Return the name of a scheduler that drives an executor."""
        registrations = [entry.registration for entry in self.registry.entries()]
        return next(r.instance for r in registrations if r.load.get("num_executors"))

    def owning_cache_manager(self) -> str:
        """Return the name of the cache manager that keeps the books."""
        registrations = [entry.registration for entry in self.registry.entries()]
        return next(r.instance for r in registrations if r.role == "cache_manager" and r.load.get("lease_epoch"))

    async def outputs(self) -> dict[str, list[OutputChunk]]:
        """Return every request's log."""
        subjects = self.bus.subjects
        logs: dict[str, list[OutputChunk]] = {}
        for stored in await self.bus.read(subjects.out_stream, subjects.out_all, OutputChunk):
            logs.setdefault(stored.message.request_id, []).append(stored.message)
        return logs

    def log(self) -> str:
        """Return what every service printed."""
        return "\n".join(f"== {path.stem}\n{path.read_text(errors='replace')}" for path in self.directory.glob("*.log"))

    async def wait_whole(self) -> None:
        """Wait until every instance is ready and has had a moment to be found."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not (self._healthy() == set(self.instances) and self._is_driven()):
                await asyncio.sleep(0.05)

    def _healthy(self) -> set[str]:
        return {e.registration.instance for e in self.registry.entries() if e.is_healthy}

    def _is_driven(self) -> bool:
        num_driven = sum(entry.registration.load.get("num_executors", 0) for entry in self.registry.entries())
        return num_driven >= self.replicas.get("executor", 1)

    async def wait_idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits anywhere; return the gauges that are not as they were before any request."""
        left: dict[str, float] = {}
        for _ in range(150):
            left = await self._left()
            if not left:
                break
            await asyncio.sleep(0.1)
        return left

    async def _left(self) -> dict[str, float]:
        gauges = ("num_requests_running", "num_requests_waiting", "num_outputs")
        left: dict[str, float] = {}
        for entry in self.registry.entries():
            load, name = entry.registration.load, entry.registration.instance
            left |= {f"{name}.{gauge}": load[gauge] for gauge in gauges if load.get(gauge)}
            if held := load.get("num_blocks", 0) - load.get("num_free_blocks", 0):
                left[f"{name}.blocks"] = held
        if work := await self.bus.transport.num_messages(self.bus.subjects.work_stream):
            left["work"] = work
        return left
