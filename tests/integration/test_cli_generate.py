"""`natterjack generate` and `chat`: over a running deployment, and over one of their own."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.integration.command_line import ECHO, CommandLine, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One running deployment for the tests that only talk to it."""
    command_line = CommandLine(tmp_path_factory.mktemp("shared"))
    yield command_line.up(*ECHO)
    command_line.end()


@pytest.fixture
def command_line(tmp_path):
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.end()


@pytest.fixture
def elsewhere():
    """Options for a bus port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return ("--set", f"bus.port={port}")


def test_without_a_deployment_one_is_started_for_the_call_and_stopped(command_line, elsewhere):
    result = command_line.run("generate", "hello", "--max-tokens", "7", *ECHO, *elsewhere)
    assert (result.returncode, result.stdout) == (0, "hellohe\n"), result.stderr
    command_line.assert_nothing_left()


def test_a_running_deployment_is_used(command_line, shared):
    result = command_line.run("generate", "hello", "--max-tokens", "7", *shared.on_this_bus)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hellohe\n", "")


def test_a_deployment_at_the_configured_port_is_used(command_line, shared):
    port = shared.nats_url.rpartition(":")[2]
    process = command_line.start("generate", "hello", "--max-tokens", "7", "--set", f"bus.port={port}", *ECHO)
    assert process.communicate(timeout=30)[0] == "hellohe\n"


def test_a_port_where_somebody_else_listens_is_not_used(command_line):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        result = command_line.run("generate", "hello", "--max-tokens", "7", "--set", f"bus.port={port}", *ECHO)
    assert (result.returncode, result.stdout) == (0, "hellohe\n"), result.stderr


def test_another_prefix_on_a_running_server_is_not_used(command_line, shared):
    port = shared.nats_url.rpartition(":")[2]
    options = ("--set", f"bus.port={port}", "--set", "bus.prefix=mine")
    result = command_line.run("generate", "hello", "--max-tokens", "7", *options, *ECHO)
    assert (result.returncode, result.stdout) == (0, "hellohe\n"), result.stderr


def test_json_has_text_tokens_finish_reason_and_usage(command_line, shared):
    result = command_line.run("generate", "hello", "--max-tokens", "7", "--json", *shared.on_this_bus)
    answer = json.loads(result.stdout)
    assert answer["text"] == "hellohe"
    assert answer["token_ids"] == list(b"hellohe")
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == 12


def test_text_comes_as_it_is_made(command_line):
    slow = command_line.up(*ECHO, "--set", "executor.step_time_s=0.3")
    process = command_line.start("generate", "hello", "--max-tokens", "8", *slow.on_this_bus, text=False)
    assert process.stdout.read(1)
    assert process.poll() is None
    started_s = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - started_s > 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--temperature", "3"], 2),
        (["--max-tokens", "0"], 2),
        (["--set", "no.such.key=1"], 2),
        (["--set", "model.name=absent"], 1),
    ],
)
def test_a_bad_option_is_refused(command_line, shared, arguments, code):
    result = command_line.run("generate", "hello", *arguments, *shared.on_this_bus)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_a_refused_request_is_a_coded_error(command_line):
    limited = command_line.up(*ECHO, "--set", "model.max_model_len=16")
    result = command_line.run("generate", "x" * 100, *limited.on_this_bus)
    assert result.returncode == 1
    assert "context_length_exceeded" in result.stderr
    result = command_line.run("generate", "x" * 100, "--json", *limited.on_this_bus)
    assert json.loads(result.stdout)["error"]["code"] == "context_length_exceeded"


def test_a_bus_that_is_configured_but_not_there_is_a_clear_error(command_line):
    result = command_line.run("generate", "hello", "--set", "bus.url=nats://127.0.0.1:9")
    assert result.returncode == 1
    assert "service_unavailable" in result.stderr
    assert "nats://127.0.0.1:9" in result.stderr


def test_a_model_that_cannot_be_had_is_a_clear_error(command_line, elsewhere):
    result = command_line.run("generate", "hello", "--set", "model.source=/no/such.gguf", *elsewhere)
    assert result.returncode == 1
    assert "/no/such.gguf does not exist" in result.stderr
    command_line.assert_nothing_left()


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_ctrl_c_while_starting_leaves_nothing(command_line, elsewhere, after_s):
    process = command_line.start("generate", "hello", "--max-tokens", "100000", *ECHO, *elsewhere)
    assert command_line.interrupt(process, after_s) == 130
    assert "Traceback" not in process.stderr.read()
    command_line.assert_nothing_left()


def test_ctrl_c_while_generating_cancels_and_leaves_nothing(command_line, elsewhere):
    slow = ("--set", "executor.step_time_s=0.2")
    process = command_line.start("generate", "hello", "--max-tokens", "200", *ECHO, *slow, *elsewhere, text=False)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert b"Traceback" not in process.stderr.read()
    command_line.assert_nothing_left()


def test_ctrl_c_stops_the_request_in_a_running_deployment(command_line):
    deployment = command_line.up(*ECHO, "--set", "executor.step_time_s=0.1")
    process = command_line.start("generate", "hello", "--max-tokens", "2000", *deployment.on_this_bus, text=False)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130

    def running():
        status = command_line.run("status", "--json", *deployment.on_this_bus)
        (scheduler,) = [service for service in json.loads(status.stdout)["services"] if service["role"] == "scheduler"]
        return scheduler["load"].get("num_requests_running", 0)

    wait_until(lambda: not running(), 10.0)


def test_a_reader_that_goes_away_ends_it_quietly(command_line, shared):
    command = [sys.executable, "-P", "-m", "services.cli", "generate", "hello", "--max-tokens", "5000"]
    process = subprocess.Popen(
        [*command, *shared.on_this_bus],
        env=command_line.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(20) == 130
    assert errors == b""
    process.stderr.close()


def test_chat_answers_every_line_with_the_conversation_so_far(command_line, shared):
    result = command_line.run("chat", "--max-tokens", "11", *shared.on_this_bus, text="first\n\nsecond\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["user:", "first", "user:", "first"]  # the echo of what the prompt begins with


def test_chat_goes_on_after_a_refused_turn(command_line):
    limited = command_line.up(*ECHO, "--set", "model.max_model_len=64")
    result = command_line.run("chat", "--max-tokens", "4", *limited.on_this_bus, text="x" * 100 + "\nhi\n")
    assert result.returncode == 0, result.stderr
    assert "context_length_exceeded" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_ctrl_c_in_a_chat_leaves_nothing(command_line, elsewhere):
    process = command_line.start("chat", *ECHO, *elsewhere, stdin=subprocess.PIPE)
    process.stdin.write("hi\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in process.stderr.read()
    command_line.assert_nothing_left()
