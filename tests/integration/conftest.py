"""Whole deployments for tests: `natterjack up` as a person would start it, on free ports, in a directory of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
import pytest

NATTERJACK = (sys.executable, "-m", "services.cli")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
ECHO = ("executor.engine=echo", "model.source=builtin:bytes", "executor.num_blocks=1024")


def free_port() -> int:
    """Return a port that is free now."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@dataclass
class Deployment:
    """One running `natterjack up`."""

    process: subprocess.Popen[bytes]
    http_url: str
    nats_url: str
    prefix: str
    directory: Path

    def settings(self) -> list[str]:
        """Return the options that make another command talk to this deployment."""
        return ["--set", f"bus.url={self.nats_url}", "--set", f"bus.prefix={self.prefix}"]

    def log(self) -> str:
        """Return everything that it and its services printed."""
        logs = sorted((self.directory / "state").rglob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in (self.directory / "up.log", *logs))

    @cached_property
    def metrics_urls(self) -> list[str]:
        """Return where its services serve their metrics; none without `telemetry.metrics_port`."""
        return re.findall(r"serving probes and metrics on (http://\S+)", self.log())

    def stop(self) -> int:
        """Ctrl-C, and wait for the end."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)


def start_deployment(directory: Path, *overrides: str, prefix: str = "nj") -> Deployment:
    """Start a deployment and wait until it is ready; fails the test with its log otherwise."""
    http_port, nats_port = free_port(), free_port()
    ports = (f"gateway.port={http_port}", f"bus.port={nats_port}")
    settings = ["console.enabled=false", *overrides, *ports, f"bus.prefix={prefix}"]
    options = [argument for setting in settings for argument in ("--set", setting)]
    with (directory / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*NATTERJACK, "up", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_STATE_HOME": str(directory / "state")},
        )
    urls = (f"http://127.0.0.1:{http_port}", f"nats://127.0.0.1:{nats_port}")
    deployment = Deployment(process, *urls, prefix, directory)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{deployment.http_url}/ready").status_code == 200:
                return deployment
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"the deployment did not become ready:\n{deployment.log()}")


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The default deployment with the real model, shared by tests that do not harm it."""
    deployment = start_deployment(
        tmp_path_factory.mktemp("deployment"), "executor.num_blocks=2048", "telemetry.metrics_port=0"
    )
    yield deployment
    assert deployment.stop() in (0, 130), deployment.log()


@pytest.fixture
def start_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Deployment]]:
    """Start a deployment of the test's own with the echo engine and no model: quick, with tokens known in advance."""
    started: list[Deployment] = []

    def start(*overrides: str, prefix: str = "nj") -> Deployment:
        deployment = start_deployment(tmp_path_factory.mktemp("echo"), *ECHO, *overrides, prefix=prefix)
        started.append(deployment)
        return deployment

    yield start
    for deployment in started:
        if deployment.process.poll() is None:
            deployment.stop()
