"""A deployment of real processes: starts, survives the death of its parts, and leaves nothing behind."""

import json
import os
import signal
import socket
import time
import urllib.request

import pytest

from tests.integration.command_line import ECHO, CommandLine, wait_until


@pytest.fixture
def command_line(tmp_path):
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One deployment for the tests after which it works again."""
    command_line = CommandLine(tmp_path_factory.mktemp("shared"))
    yield command_line.up(*ECHO, "--set", "supervisor.heartbeat_timeout_s=2", "--set", "supervisor.restarts.limit=20")
    command_line.end()


def complete(http_url, prompt="hello", max_tokens=7):
    body = json.dumps({"model": "smol", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{http_url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["text"]


def completes_within(http_url, timeout_s):
    """Right after a restart a request may still be refused as unavailable; it must work soon."""

    def completes():
        try:
            return complete(http_url) == "hellohe"
        except OSError:
            return False

    wait_until(completes, timeout_s)


def test_up_serves_and_ctrl_c_leaves_nothing(command_line):
    deployment = command_line.up(*ECHO)
    assert complete(deployment.http_url) == "hellohe"
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(20) == 130
    command_line.assert_nothing_left()


@pytest.mark.parametrize(
    "name", ["gateway-0", "tokenizer-0", "scheduler-0", "cache_manager-0", "executor-0", "nats-server"]
)
def test_a_part_that_is_killed_while_idle_is_restarted_and_the_next_request_works(shared, name):
    complete(shared.http_url)
    pid = shared.pid_of(name)
    os.kill(pid, signal.SIGKILL)
    shared.wait_replaced(name, pid)
    completes_within(shared.http_url, 30.0)
    assert f"{name}: restarting" in shared.stderr.read_text()


def test_a_service_that_hangs_is_killed_and_restarted(shared):
    pid = shared.pid_of("tokenizer-0")
    os.kill(pid, signal.SIGSTOP)
    shared.wait_replaced("tokenizer-0", pid)
    completes_within(shared.http_url, 30.0)
    assert "silent for" in shared.stderr.read_text()


def test_when_the_supervisor_is_killed_nothing_survives(command_line):
    deployment = command_line.up(*ECHO)
    assert len(command_line.descendants()) == 7
    deployment.process.kill()
    deployment.process.wait()
    wait_until(lambda: not command_line.descendants(), 5.0, lambda: str(command_line.descendants()))


def test_a_second_ctrl_c_kills_at_once(command_line):
    deployment = command_line.up(*ECHO, "--set", "supervisor.shutdown_grace_s=60")
    os.kill(deployment.pid_of("gateway-0"), signal.SIGSTOP)
    deployment.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert deployment.process.poll() is None
    started_s = time.monotonic()
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(5) == 130
    assert time.monotonic() - started_s < 2
    wait_until(lambda: not command_line.descendants(), 5.0)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.4, 0.7, 1.1])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(command_line, after_s):
    process = command_line.start("up", "--set", "bus.port=0", "--set", "gateway.port=0", *ECHO)
    assert command_line.interrupt(process, after_s) == 130
    assert "Traceback" not in process.stderr.read()
    command_line.assert_nothing_left()


@pytest.mark.parametrize("after_s", [0.2, 0.5, 0.9])
def test_a_supervisor_killed_at_any_moment_of_the_start_leaves_no_process(command_line, after_s):
    process = command_line.start("up", "--set", "bus.port=0", "--set", "gateway.port=0", *ECHO)
    time.sleep(after_s)
    process.kill()
    process.wait()
    wait_until(lambda: not command_line.descendants(), 5.0, lambda: str(command_line.descendants()))


def test_sigterm_stops_as_well(command_line):
    deployment = command_line.up(*ECHO)
    deployment.process.terminate()
    assert deployment.process.wait(20) == 143
    command_line.assert_nothing_left()


@pytest.mark.parametrize("key", ["bus.port", "gateway.port"])
def test_a_taken_port_is_an_immediate_clear_error(command_line, key):
    other = {"bus.port": "gateway.port", "gateway.port": "bus.port"}[key]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        started_s = time.monotonic()
        result = command_line.run("up", "--set", f"{key}={port}", "--set", f"{other}=0", *ECHO)
    assert result.returncode == 1
    assert f"Port {port} on 127.0.0.1 is taken ({key})" in result.stderr
    assert f"--set {key}=PORT" in result.stderr
    assert time.monotonic() - started_s < 5
    command_line.assert_nothing_left()


def test_two_deployments_run_side_by_side(command_line, shared):
    first = shared
    second = command_line.up(*ECHO, "--set", "bus.prefix=other", "--set", "model.name=second")
    assert complete(first.http_url) == "hellohe"
    for deployment, name in ((first, "smol"), (second, "second")):
        with urllib.request.urlopen(f"{deployment.http_url}/v1/models", timeout=10) as response:
            assert [model["id"] for model in json.load(response)["data"]] == [name]
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(20) == 130
    assert complete(first.http_url) == "hellohe"


def test_two_deployments_share_one_server_under_two_prefixes(command_line, shared):
    second = command_line.up(*ECHO, *shared.on_this_bus, "--set", "bus.prefix=other")
    assert complete(second.http_url) == "hellohe"
    assert complete(shared.http_url) == "hellohe"


def test_a_second_deployment_with_the_same_prefix_on_one_server_is_refused(command_line, shared):
    result = command_line.run("up", *ECHO, *shared.on_this_bus, "--set", "gateway.port=0")
    assert result.returncode == 1
    assert "bus.prefix" in result.stderr
    assert complete(shared.http_url) == "hellohe"


def test_a_state_directory_in_use_is_refused_and_a_killed_ones_is_free_again(command_line, tmp_path):
    state = ("--set", f"supervisor.state_dir={tmp_path / 'own'}")
    first = command_line.up(*ECHO, *state)
    result = command_line.run("up", *ECHO, *state, "--set", "bus.port=0", "--set", "gateway.port=0")
    assert result.returncode == 1
    assert "Another deployment" in result.stderr
    first.process.kill()
    first.process.wait()
    assert complete(command_line.up(*ECHO, *state).http_url) == "hellohe"


def test_a_missed_deadline_ends_the_start_and_names_the_cause(command_line):
    result = command_line.run(
        "up", *ECHO, "--set", "bus.port=0", "--set", "gateway.port=0", "--set", "supervisor.deadlines.connect_s=0.05"
    )
    assert result.returncode == 1
    assert "supervisor.deadlines.connect_s" in result.stderr
    assert "starting process" in result.stderr
    command_line.assert_nothing_left()


def test_a_corrupt_model_file_ends_the_start_with_the_cause(command_line, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all" * 1000)
    result = command_line.run(
        "up", "--set", "bus.port=0", "--set", "gateway.port=0", "--set", f"model.source={tmp_path / 'bad.gguf'}"
    )
    assert result.returncode == 1
    assert "failed: it ended with exit code 1" in result.stderr
    assert "bad.gguf" in result.stderr.partition("exit code 1")[2]
    command_line.assert_nothing_left()


def test_a_missing_model_file_ends_the_start_with_the_cause(command_line):
    result = command_line.run(
        "up", "--set", "bus.port=0", "--set", "gateway.port=0", "--set", "model.source=/no/such.gguf"
    )
    assert result.returncode == 1
    assert "/no/such.gguf does not exist" in result.stderr
    command_line.assert_nothing_left()


def test_an_external_bus_that_cannot_be_reached_is_a_clear_error(command_line):
    result = command_line.run(
        "up",
        *ECHO,
        "--set",
        "bus.url=nats://127.0.0.1:9",
        "--set",
        "bus.connect_timeout_s=0.5",
        "--set",
        "gateway.port=0",
    )
    assert result.returncode == 1
    assert "Cannot reach NATS at nats://127.0.0.1:9" in result.stderr


def test_everything_but_the_executor_runs_at_a_lower_priority(shared):
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = {
        name: os.getpriority(os.PRIO_PROCESS, shared.pid_of(name)) - ours
        for name in ("executor-0", "gateway-0", "tokenizer-0", "scheduler-0", "cache_manager-0", "nats-server")
    }
    assert niceness.pop("executor-0") == 0
    assert set(niceness.values()) == {min(10, 19 - ours)}
