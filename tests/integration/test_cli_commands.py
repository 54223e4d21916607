"""`natterjack status`, `config`, `models`, `serve` and `--help`."""

import json
import os
import random
import signal
import time

import pytest

from tests.integration.command_line import ECHO, CommandLine, wait_until

REQUIRED = {"gateway", "tokenizer", "scheduler", "cache_manager", "executor"}


@pytest.fixture
def command_line(tmp_path):
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One running deployment for the tests that only talk to it."""
    command_line = CommandLine(tmp_path_factory.mktemp("shared"))
    yield command_line.up(*ECHO)
    command_line.end()


def test_help_is_quick_and_names_the_commands(command_line):
    command_line.run("--help")
    started_s = time.monotonic()
    result = command_line.run("--help")
    assert all(name in result.stdout for name in ("up", "generate", "chat", "serve", "status", "models", "config"))
    assert time.monotonic() - started_s < 2.0  # 0.25 s on an idle machine


def test_status_without_a_deployment_fails_at_once_and_says_why(command_line):
    result = command_line.run("status", "--set", "bus.port=9")
    assert result.returncode == 1
    assert "Nothing answers at nats://127.0.0.1:9" in result.stdout
    result = command_line.run("status", "--json", "--set", "bus.port=9")
    assert result.returncode == 1
    answer = json.loads(result.stdout)
    assert (answer["ready"], set(answer["missing"])) == (False, REQUIRED)


def test_status_of_a_running_deployment(command_line, shared):
    result = command_line.run("status", *shared.on_this_bus)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "Ready."
    result = command_line.run("status", "--json", *shared.on_this_bus)
    answer = json.loads(result.stdout)
    assert answer["ready"] is True
    assert {service["role"] for service in answer["services"]} == REQUIRED


def test_status_does_not_believe_the_entry_of_a_service_that_has_stopped_beating(command_line, shared):
    os.kill(shared.pid_of("scheduler-0"), signal.SIGSTOP)
    result = command_line.run("status", "--json", *shared.on_this_bus)
    os.kill(shared.pid_of("scheduler-0"), signal.SIGCONT)
    assert result.returncode == 1
    assert json.loads(result.stdout)["missing"] == ["scheduler"]


def test_status_waits_until_the_deployment_is_ready(command_line):
    port = random.randrange(20_000, 32_000)  # below the ports that the system gives to others meanwhile
    waiting = command_line.start("status", "--wait", "30", "--set", f"bus.port={port}")
    up = command_line.start("up", *ECHO, "--set", f"bus.port={port}", "--set", "gateway.port=0")
    said, _ = waiting.communicate(timeout=60)
    up.send_signal(signal.SIGINT)
    assert waiting.returncode == 0, (said, up.communicate(timeout=20))


def test_status_gives_up_waiting_after_the_time_given(command_line):
    started_s = time.monotonic()
    assert command_line.run("status", "--wait", "1", "--set", "bus.port=9").returncode == 1
    assert 1.0 < time.monotonic() - started_s < 10


def test_config_show_names_value_and_source_and_masks_secrets(command_line, tmp_path):
    (tmp_path / "p.yaml").write_text("gateway: {port: 8123}\n")
    url = ("--set", "bus.url=nats://user:hunter2@host:4222")
    result = command_line.run("config", "show", "-c", "p.yaml", *url)
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert lines["gateway.port"] == ["8123", "[file]"]
    assert lines["bus.url"] == ["nats://********@host:4222", "[--set]"]
    assert lines["gateway.host"] == ["127.0.0.1"]
    values = json.loads(command_line.run("config", "show", "-c", "p.yaml", *url, "--json").stdout)
    assert values["gateway.port"] == {"value": 8123, "source": "file"}
    assert "hunter2" not in result.stdout


def test_config_check_accepts_a_right_file_and_explains_a_wrong_one(command_line, tmp_path):
    (tmp_path / "right.yaml").write_text("gateway: {port: 1}\n")
    (tmp_path / "wrong.yaml").write_text("gateway: {prot: 1}\n")
    assert command_line.run("config", "check", "--file-only", "right.yaml").returncode == 0
    result = command_line.run("config", "check", "-c", "wrong.yaml")
    assert result.returncode == 2
    assert "wrong.yaml, line 1" in result.stderr
    assert "Did you mean 'gateway.port'?" in result.stderr
    assert command_line.run("config", "check", "right.yaml", "-c", "wrong.yaml").returncode == 2


def test_config_check_tells_what_this_machine_would_run_or_refuse(command_line):
    result = command_line.run("config", "check", "--set", "executor.engine=reference")
    assert result.returncode == 0
    assert "would run the reference engine on cpu" in result.stdout
    more = ("--set", "executor.kv_dtype=int8")
    result = command_line.run("config", "check", "--set", "executor.engine=reference", *more)
    assert result.returncode == 2
    assert "would refuse" in result.stderr
    assert "kv_dtype 'int8' is not one of torch's engines'" in result.stderr


def test_models_pull_and_list(command_line, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    result = command_line.run("models", "pull", str(tmp_path / "m.gguf"))
    assert (result.returncode, result.stdout.strip()) == (0, str(tmp_path / "m.gguf"))
    result = command_line.run("models", "pull", "s3:nowhere")
    assert result.returncode == 1
    assert "Unknown model source" in result.stderr
    options = ("--set", f"model.cache_dir={tmp_path / 'models'}")
    assert json.loads(command_line.run("models", "list", "--json", *options).stdout)["models"] == []
    assert "No models" in command_line.run("models", "list", *options).stderr


def test_serve_runs_one_service_until_a_signal(command_line, shared):
    process = command_line.start("serve", "tokenizer", *ECHO, *shared.on_this_bus, "--instance", "tokenizer-extra")

    def is_ready():
        status = command_line.run("status", *shared.on_this_bus).stdout
        return any(line.split()[:2] == ["tokenizer-extra", "ready"] for line in status.splitlines())

    wait_until(is_ready, 20.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert "tokenizer-extra" not in command_line.run("status", *shared.on_this_bus).stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["wizard"], 2), (["tokenizer", "--set", "no.key=1"], 2), (["tokenizer", "-c", "absent"], 2)],
)
def test_serve_refuses_what_it_does_not_know(command_line, arguments, code):
    assert command_line.run("serve", *arguments).returncode == code
