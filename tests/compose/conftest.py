"""Deployments by Docker Compose for the tests of this directory, or a skip that says why there are none.

The images are built from this tree, under a tag and a project name of the tests' own. `NJ_WHEELS` and `NJ_TORCH_INDEX`
of the environment are passed on to the build, as for anybody who builds without torch's package index.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 900.0
UP_TIMEOUT_S = 180


@dataclass
class Compose:
    """One project: its containers, volumes and network carry its name."""

    project: str
    env_file: Path
    http_port: int
    nats_port: int
    console_port: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def __call__(self, *arguments: str, timeout_s: float = 120.0, check: bool = True) -> str:
        """Run `docker compose ARGUMENTS` for this project; returns what it printed."""
        command = ["docker", "compose", "-p", self.project, "--env-file", str(self.env_file), *arguments]
        return run(command, timeout_s=timeout_s, check=check)

    def variable(self, name: str) -> str:
        return dict(line.split("=", 1) for line in self.env_file.read_text().splitlines())[name]

    def password(self, user: str) -> str:
        return self.variable(f"NJ_PASSWORD_{user.upper()}")

    def nats_url(self, user: str = "client", host: str = "127.0.0.1") -> str:
        port = self.nats_port if host == "127.0.0.1" else 4222
        return f"nats://{user}:{self.password(user)}@{host}:{port}"

    def left(self) -> dict[str, list[str]]:
        """Return what of this project exists, by kind."""
        label = f"label=com.docker.compose.project={self.project}"
        return {
            "containers": run(["docker", "ps", "-aq", "--filter", label]).split(),
            "volumes": run(["docker", "volume", "ls", "-q", "--filter", label]).split(),
            "networks": run(["docker", "network", "ls", "-q", "--filter", label]).split(),
        }

    def down(self) -> None:
        self("--profile", "*", "down", "-v", "--remove-orphans", "-t", "20", check=False)


def run(command: list[str], *, timeout_s: float = 120.0, check: bool = True) -> str:
    """Run a command in the project's root; a failure shows what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def why_no_engine() -> str | None:
    """Return why no containers can be started here."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for arguments, what in (("info", "no Docker engine answers"), ("compose version", "no compose")):
        done = subprocess.run(["docker", *arguments.split()], capture_output=True, text=True, timeout=30)
        if done.returncode:
            return f"{what}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return None


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def engine() -> None:
    """Skip without a container engine."""
    if (reason := why_no_engine()) is not None:
        pytest.skip(f"no containers here, so compose.yaml is only checked on paper: {reason}")


@pytest.fixture(scope="session")
def start_project(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Compose]]:
    """Start a deployment of compose.yaml: `start_project("gateway", NJ_CONFIG="./configs/echo.yaml")`; all end."""
    with contextlib.ExitStack() as stack:

        def start(*services: str, **variables: str) -> Compose:
            project = new_project(tmp_path_factory.mktemp("compose") / "env", variables)
            stack.callback(project.down)
            project("build", "--quiet", timeout_s=BUILD_TIMEOUT_S)
            wait = ("--wait", "--wait-timeout", str(UP_TIMEOUT_S), "--pull", "never")
            try:
                project("up", "-d", *wait, *services, timeout_s=UP_TIMEOUT_S + 60)
            except pytest.fail.Exception:
                print(project("logs", "--tail", "20", check=False))
                raise
            return project

        yield start


def new_project(env_file: Path, variables: dict[str, str]) -> Compose:
    """Write the variables of a new project, with fresh passwords and free ports."""
    given = {name: os.environ[name] for name in ("NJ_WHEELS", "NJ_TORCH_INDEX") if name in os.environ}
    project = Compose(f"njtest-{uuid.uuid4().hex[:8]}", env_file, free_port(), free_port(), free_port())
    ports = {"NJ_HTTP_PORT": str(project.http_port), "NJ_NATS_PORT": str(project.nats_port)}
    ports["NJ_CONSOLE_PORT"] = str(project.console_port)
    lines = [f"{name}={value}\n" for name, value in {"NJ_TAG": "test", **ports, **given, **variables}.items()]
    env_file.write_text(run(["sh", "configs/docker/credentials.sh"]) + "".join(lines))
    return project


@pytest.fixture(scope="session")
def compose(start_project: Callable[..., Compose]) -> Compose:
    """The deployment with its defaults."""
    return start_project()
