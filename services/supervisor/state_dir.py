"""One deployment's directory on this machine: streams, logs, and the lock that keeps a second one out."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.runtime.settings import BusSettings, state_dir
from services.supervisor.events import DeploymentError, StateDirTaken


@dataclass(frozen=True, slots=True)
class StateDir:
    """Where one deployment's files lie."""

    path: Path

    @property
    def logs(self) -> Path:
        """Log files, one per child."""
        return self.path / "logs"

    @property
    def streams(self) -> Path:
        """The embedded server's streams, unless `bus.store_dir` says otherwise."""
        return self.path / "streams"


def default_path(bus: BusSettings) -> Path:
    """Return the state directory of a deployment that names none: one per prefix and server."""
    server = (bus.url or str(bus.port)).rsplit("@", 1)[-1].rsplit("/", 1)[-1].replace(":", "-")
    return state_dir() / f"{bus.prefix}-{server}"


@contextlib.contextmanager
def hold_state_dir(path: Path) -> Iterator[StateDir]:
    """Create and lock a state directory; raise StateDirTaken while another process holds it.

    The kernel releases the lock when its holder dies, however it dies.
    """
    path = path.expanduser().absolute()
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise DeploymentError(
            f"Cannot use the state directory {path}: {error.strerror}. Set supervisor.state_dir to another one."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StateDirTaken(
                f"Another deployment (process {lock.read().strip() or 'unknown'}) uses {path}. "
                "Stop it, or give this one its own bus.prefix, bus.port and gateway.port."
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield StateDir(path)


@contextlib.contextmanager
def temporary_state_dir() -> Iterator[StateDir]:
    """Hold a state directory for a deployment that leaves nothing behind."""
    path = Path(tempfile.mkdtemp(prefix="natterjack-"))
    try:
        with hold_state_dir(path) as held:
            yield held
    finally:
        shutil.rmtree(path, ignore_errors=True)
