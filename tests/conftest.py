"""What every test may ask for: a real nats-server, a typed bus over it or in memory, spans, the model file.

Owns the servers that tests start: each ends with its fixture, or with this process at the latest. Knows no service.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.subjects import Subjects
from services.runtime import launcher, model_source
from services.runtime.bus import Bus, open_bus
from services.runtime.memory_transport import MemoryServer
from services.runtime.settings import BusSettings, ModelSettings
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing

# As an executor does: torch, which loads OpenMP, comes later. Two workers whose threads spin starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SERVER_START_TIMEOUT_S = 10.0
WAIT_TIMEOUT_S = 10.0

JETSTREAM = "jetstream {{ store_dir: {store}, max_file_store: 4TB, max_memory_store: 1TB }}"
"""Limits above what all prefixes of a test run reserve together; nothing near it is written."""


@dataclass
class NatsServer:
    """One nats-server process, its directory and its port, which it keeps when it is started again."""

    directory: Path
    jetstream: bool = True
    options: str = ""
    port: int = -1
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitoring_url(self) -> str:
        """Where the server tells about itself; `options` must open it."""
        assert self.process is not None
        ports = json.loads((self.directory / f"nats-server_{self.process.pid}.ports").read_text())
        return str(ports["monitoring"][0])

    def start(self) -> None:
        """Start, or start again on the same port and store; returns when the server takes connections."""
        config = self.directory / "nats.conf"
        jetstream = JETSTREAM.format(store=json.dumps(str(self.directory / "store"))) if self.jetstream else ""
        config.write_text(f"{jetstream}\n{self.options}\n")
        binary = str(Path(sys.executable).with_name("nats-server"))
        arguments = ["-c", str(config), "-a", "127.0.0.1", "-p", str(self.port)]
        files = ["--ports_file_dir", str(self.directory), "-l", str(self.directory / "nats.log")]
        self.process = subprocess.Popen(launcher.wrap([binary, *arguments, *files]))
        self.port = self._wait_for_port(self.directory / f"nats-server_{self.process.pid}.ports")

    def _wait_for_port(self, ports: Path) -> int:
        deadline = time.monotonic() + SERVER_START_TIMEOUT_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            if ports.exists() and (text := ports.read_text()).endswith("}"):
                return int(json.loads(text)["nats"][0].rpartition(":")[2])
            time.sleep(0.01)
        pytest.fail(f"nats-server did not start:\n{(self.directory / 'nats.log').read_text()}")

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that tests share; every test takes a prefix of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def start_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NatsServer]]:
    """Start a server of the test's own: `start_nats(jetstream=False, options="max_payload: 64KB")`."""
    servers: list[NatsServer] = []

    def start(**options: object) -> NatsServer:
        servers.append(NatsServer(tmp_path_factory.mktemp("nats"), **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def span_exporter() -> InMemorySpanExporter:
    """Holds every span that ended."""
    return InMemorySpanExporter()


@pytest.fixture
def tracing(span_exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    """A tracer whose spans are in `span_exporter` as soon as they end."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    tracing = Tracing(provider)
    yield tracing
    tracing.close()


@dataclass
class BusFactory:
    """Connects to one message system, in one deployment's prefix unless told otherwise."""

    tracing: Tracing
    settings: BusSettings
    memory: MemoryServer | None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def __call__(self, *, prefix: str | None = None) -> Bus:
        """Return a new connection whose deployment's streams exist."""
        settings = self.settings.model_copy(update={"prefix": prefix or self.settings.prefix})
        if self.memory is not None:
            bus = Bus(self.memory.connect(), Subjects(settings.prefix), self.tracing)
            self.stack.push_async_callback(bus.close)
        else:
            name = f"test-{next(self._numbers)}"
            bus = await self.stack.enter_async_context(open_bus(settings, self.tracing, name=name))
        await ensure_streams(bus.transport, bus.subjects, settings)
        return bus


def fresh_prefix() -> str:
    """Return a deployment prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture
async def connect_nats_bus(nats_server: NatsServer, tracing: Tracing) -> AsyncIterator[BusFactory]:
    """Connect to the shared server: `await connect_nats_bus()`."""
    factory = BusFactory(tracing, BusSettings(url=nats_server.url, prefix=fresh_prefix()), None)
    async with factory.stack:
        yield factory


@pytest.fixture
async def connect_memory_bus(tracing: Tracing) -> AsyncIterator[BusFactory]:
    """Connect to a message system in memory."""
    factory = BusFactory(tracing, BusSettings(prefix=fresh_prefix()), MemoryServer())
    async with factory.stack:
        yield factory


@pytest.fixture(params=["memory", "nats"])
def connect_bus(request: pytest.FixtureRequest) -> BusFactory:
    """Connect to either message system: one suite keeps both to the same behaviour."""
    factory: BusFactory = request.getfixturevalue(f"connect_{request.param}_bus")
    return factory


@pytest.fixture
async def bus(connect_bus: BusFactory) -> Bus:
    """A connection to either message system."""
    return await connect_bus()


@pytest.fixture
async def memory_bus(connect_memory_bus: BusFactory) -> Bus:
    """A connection to a message system in memory."""
    return await connect_memory_bus()


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Wait until a condition holds: `await eventually(lambda: seen == [1, 2])`."""

    async def wait(condition: Callable[[], object], timeout_s: float = WAIT_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still not so after {timeout_s:g} s"
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file, downloaded the first time."""
    return model_source.resolve(ModelSettings())
