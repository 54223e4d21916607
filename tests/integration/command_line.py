"""Runs the real `natterjack` command for tests, and finds every process that descends from it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ECHO = ("--set", "executor.engine=echo", "--set", "model.source=builtin:bytes")
MARK = "TEST_RUN_MARK"


@dataclass
class CommandLine:
    """Starts commands with a state and a temporary directory of their own; every descendant carries a mark."""

    directory: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NATTERJACK_")}
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        ours = {"XDG_STATE_HOME": str(self.directory / "state"), "TMPDIR": str(temporary), MARK: self.mark}
        return {**clean, **ours, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.cli", *arguments],
            env=self.environment(),
            cwd=self.directory,
            start_new_session=True,
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, timeout_s: float = 60.0, text: str = "") -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, stdin=subprocess.PIPE)
        stdout, stderr = process.communicate(text, timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def up(self, *arguments: str) -> "RunningDeployment":
        """Start a deployment on free ports and return when it is ready."""
        log = (self.directory / f"up-{len(self.processes)}.stderr").open("w+")
        free = ("--set", "bus.port=0", "--set", "gateway.port=0", "--set", "console.enabled=false")
        process = self.start("up", *free, *arguments, stderr=log)
        greeting = ""
        while "Ctrl-C stops it" not in greeting:
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise AssertionError(f"'up' ended: {greeting}\n{log.read()}")
            greeting += line
        words = greeting.split()
        http = words[words.index("HTTP") + 1].removesuffix("/v1")
        return RunningDeployment(self, process, http, words[words.index("NATS") + 1], Path(log.name))

    def descendants(self) -> dict[int, str]:
        """Return every living process that carries the mark, with its command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in environment and state not in "ZX":
                found[int(entry.name)] = command
        return found

    def interrupt(self, process: subprocess.Popen[str], after_s: float) -> int:
        """Press Ctrl-C `after_s` after the program itself has begun (before, it is the interpreter's), and wait."""
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: process.poll() is not None or "pydantic_core" in maps.read_text(), 20.0)
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        return process.wait(30)

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        wait_until(lambda: not self.descendants(), timeout_s, lambda: f"left: {self.descendants()}")
        assert list((self.directory / "tmp").glob("natterjack-*")) == []

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for pid in self.descendants():
            os.kill(pid, signal.SIGKILL)


@dataclass
class RunningDeployment:
    """A deployment that `natterjack up` has started."""

    command_line: CommandLine
    process: subprocess.Popen[str]
    http_url: str
    nats_url: str
    stderr: Path

    def pid_of(self, name: str) -> int:
        """Return the process of a service such as `executor-0`, or of `nats-server`."""
        for pid, command in self.command_line.descendants().items():
            is_launcher = "launcher.py" in command
            if not is_launcher and (command.endswith(f"--instance {name} ") or f"/{name} -c" in command):
                return pid
        return 0

    def wait_replaced(self, name: str, old_pid: int) -> None:
        wait_until(lambda: self.pid_of(name) not in {0, old_pid}, 20.0)

    @property
    def on_this_bus(self) -> tuple[str, str]:
        """Options that lead another command to this deployment."""
        return ("--set", f"bus.url={self.nats_url}")


def wait_until(
    condition: Callable[[], object], timeout_s: float = 10.0, why: Callable[[], str] = lambda: "timed out"
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
