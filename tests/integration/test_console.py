"""The console beside a real deployment: it sees every request, is asked over the bus, and is missed by nobody."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.integration.command_line import ECHO, CommandLine, RunningDeployment, wait_until
from tests.integration.conftest import free_port

CONSOLE = ("--set", "console.enabled=true")
KINDS = {"queued", "cached", "prefilled", "decoded", "ended"}
SPANS = {
    "POST /v1/completions",
    "request generate_request",
    "process generate_request",
    "tokenizer.encode",
    "publish work_item",
    "scheduler.queue",
    "scheduler.admit",
    "cache_manager.acquire",
    "executor.prefill",
    "executor.decode",
    "tokenizer.detokenize",
}


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    with ExitStack() as stack:
        command_line = CommandLine(tmp_path_factory.mktemp("console"))
        stack.callback(command_line.end)
        yield command_line


@pytest.fixture(scope="module")
def console_url() -> str:
    return f"http://127.0.0.1:{free_port()}/console"


@pytest.fixture(scope="module")
def deployment(command_line: CommandLine, console_url: str) -> RunningDeployment:
    port = console_url.rpartition(":")[2].partition("/")[0]
    settings = ("executor.step_time_s=0.004", f"console.port={port}")
    deployment = command_line.up(*ECHO, *CONSOLE, *(word for one in settings for word in ("--set", one)))
    wait_until(lambda: is_up(console_url), 20)
    return deployment


def is_up(console_url: str) -> bool:
    try:
        return httpx.get(console_url).status_code == 200
    except httpx.HTTPError:
        return False


def complete(deployment: RunningDeployment, **more: object) -> str:
    """Ask for a completion; returns its id."""
    body = {"model": "smol", "prompt": "hello", "max_tokens": 30, "ignore_eos": True} | more
    response = httpx.post(f"{deployment.http_url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def traced(deployment: RunningDeployment, console_url: str, **more: object) -> dict[str, object]:
    """Ask until a request's whole trace is known; services learn of a new console within a second."""
    found: list[dict[str, object]] = []

    def look() -> bool:
        name = complete(deployment, **more)
        for _ in range(20):
            trace = httpx.get(f"{console_url}/traces/{name}").json()
            kinds = {decision["kind"] for decision in trace["decisions"]}
            if kinds >= KINDS and {row["name"] for row in trace["rows"]} >= SPANS:
                found.append(trace)
                return True
            time.sleep(0.1)
        return False

    wait_until(look, 20)
    return found[0]


def test_a_requests_waterfall_is_told_over_http_and_in_the_terminal(
    command_line: CommandLine, deployment: RunningDeployment, console_url: str
) -> None:
    trace = traced(deployment, console_url)
    rows = {row["name"]: row for row in trace["rows"]}  # type: ignore[attr-defined]
    assert {row["role"] for row in rows.values()} == {"gateway", "tokenizer", "scheduler", "cache_manager", "executor"}
    assert rows["executor.decode"]["duration_s"] > 29 * 0.004
    shown = command_line.run("trace", str(trace["request_ids"][-1]), *deployment.on_this_bus)  # type: ignore[index]
    assert shown.returncode == 0, shown.stderr
    assert "decoded 30 tokens" in shown.stdout
    assert "executor.decode" in shown.stdout
    as_json = command_line.run("trace", str(trace["trace_id"]), "--json", *deployment.on_this_bus)
    assert json.loads(as_json.stdout)["rows"] == trace["rows"]
    unknown = command_line.run("trace", "req-unknown", *deployment.on_this_bus)
    assert unknown.returncode == 1
    assert "natterjack explain req-unknown" in unknown.stderr


def test_top_shows_the_deployment_as_json(command_line: CommandLine, deployment: RunningDeployment) -> None:
    top = command_line.run("top", "--json", *deployment.on_this_bus)
    assert top.returncode == 0, top.stderr
    seen = json.loads(top.stdout)
    assert seen["health"] == "ok"
    assert [view["role"] for view in seen["roles"] if view["instances"]][-1] == "console"


def test_a_console_that_dies_is_missed_by_no_request_and_comes_back(
    command_line: CommandLine, deployment: RunningDeployment, console_url: str
) -> None:
    pid = deployment.pid_of("console-0")
    os.kill(pid, signal.SIGKILL)
    complete(deployment)
    assert command_line.run("status", *deployment.on_this_bus).returncode == 0
    deployment.wait_replaced("console-0", pid)
    wait_until(lambda: is_up(console_url), 20)
    assert traced(deployment, console_url)["rows"]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[CommandLine]:
    """Finds the processes of its own deployment only."""
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.end()


def test_a_deployment_goes_on_without_a_console_that_cannot_be_kept(other: CommandLine) -> None:
    limit = ("--set", "supervisor.restarts.limit=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = other.up(*ECHO, *CONSOLE, *limit, "--set", f"console.port={port}")
        wait_until(lambda: "console-0: ready" in deployment.stderr.read_text(), 20)  # on another port
    killed: list[int] = []
    for _ in range(2):
        deployment.wait_replaced("console-0", killed[-1] if killed else 0)
        killed.append(deployment.pid_of("console-0"))
        os.kill(killed[-1], signal.SIGKILL)
    wait_until(lambda: "console-0: failed" in deployment.stderr.read_text())
    complete(deployment)
    answer = other.run("trace", "req-1", *deployment.on_this_bus)
    assert answer.returncode == 3
    assert "No console answers" in answer.stderr
    assert "natterjack explain req-1" in answer.stderr
    assert other.run("status", *deployment.on_this_bus).returncode == 0
