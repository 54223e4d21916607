"""`natterjack record`, `replay`, `compare`, `explain` and `config diff` against running deployments."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.recording.capture_file import Capture
from services.runtime.bus import open_bus
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.changed_build import MACHINE, ChangedCommandLine
from tests.integration.command_line import ECHO, ROOT, CommandLine, RunningDeployment, wait_until
from tests.integration.varied_traffic import send_everything

QUICK = (*ECHO, "--set", "executor.step_time_s=0.001", "--set", "executor.num_blocks=1024")


@pytest.fixture(scope="module")
def command_line(tmp_path_factory):
    command_line = CommandLine(tmp_path_factory.mktemp("recording"))
    yield command_line
    command_line.end()


@pytest.fixture(scope="module")
def deployment(command_line):
    return command_line.up(*QUICK)


@pytest.fixture(scope="module")
def recorded(command_line, deployment):
    """The recording of varied traffic that the tests of this file read."""
    path = command_line.directory / "a.jsonl.zst"
    recorder = start_recorder(command_line, deployment, path, "--label", "varied")
    send(deployment, num_requests=60)
    _, said = stop(recorder)
    assert "60 requests ended, nothing missing" in said
    return path


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch):
    """A command in this process leaves its priority alone: without privileges there is no way back."""
    monkeypatch.setattr("services.cli.record.lower_priority", lambda niceness: contextlib.nullcontext())
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def here(*arguments: str):
    """Run a command in this process, which is quicker."""
    return CliRunner().invoke(app, arguments)


def start_recorder(command_line, deployment, path, *options):
    recorder = command_line.start("record", "-o", str(path), *deployment.on_this_bus, *options)
    assert "Recording to" in recorder.stderr.readline()
    return recorder


def stop(recorder):
    recorder.send_signal(signal.SIGINT)
    said = recorder.communicate(timeout=20)
    assert recorder.returncode == 0, said
    return said


def send(deployment: RunningDeployment, num_requests: int = 0) -> float:
    """Send varied traffic and return how long it took."""

    async def main() -> None:
        from opentelemetry.sdk.trace import TracerProvider

        settings = BusSettings(url=deployment.nats_url)
        async with open_bus(settings, Tracing(TracerProvider()), name="traffic") as bus:
            await send_everything(bus, chat=False, num_requests=num_requests)

    started_s = time.monotonic()
    asyncio.run(main())
    return time.monotonic() - started_s


def test_a_replay_against_the_same_deployment_is_equal(command_line, deployment, recorded):
    again = command_line.directory / "b.jsonl.zst"
    against = ("--against", deployment.nats_url)
    result = here("replay", str(recorded), *against, "--speed", "max", "-o", str(again))
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "EQUAL: 60 requests" in result.stdout
    result = here("replay", str(recorded), *against, "--speed", "20", "--json")
    assert (result.exit_code, json.loads(result.stdout)["equal"]) == (0, True)
    result = here("compare", str(recorded), str(again))
    assert (result.exit_code, result.stdout.splitlines()[-1][:18]) == (0, "EQUAL: 60 requests")
    assert Capture(again).header.label == "replay of a.jsonl.zst"


def test_another_model_answers_differently_and_a_slower_one_too_slowly(command_line, deployment, recorded):
    again = command_line.directory / "c.jsonl.zst"
    recorder = start_recorder(command_line, deployment, again)
    send(deployment)
    stop(recorder)
    result = here("compare", str(recorded), str(again), "--json")
    assert result.exit_code == 1
    whats = {difference["what"] for difference in json.loads(result.stdout)["differences"]}
    assert whats == {"presence"}  # fewer requests: the rest has no counterpart
    result = here("compare", str(recorded), str(recorded), "--latency", "0")
    assert result.exit_code == 0, result.stdout


def test_what_cannot_be_used_ends_with_code_2(command_line, deployment, recorded, tmp_path):
    (tmp_path / "not.zst").write_text("model: {}")
    for arguments in (
        ("replay", str(tmp_path / "not.zst"), "--against", deployment.nats_url),
        ("replay", str(recorded), "--against", "nats://127.0.0.1:9"),
        ("replay", str(recorded), "--speed", "fast"),
        ("compare", str(tmp_path / "absent"), str(recorded)),
        ("record", "-o", str(tmp_path / "x"), "--filter", "steps"),
        ("record", "-o", str(tmp_path / "absent" / "x"), *deployment.on_this_bus),
        ("explain", "x", "-f", str(tmp_path / "not.zst")),
        ("config", "diff", str(recorded), "nats://127.0.0.1:9"),
    ):
        result = here(*arguments)
        assert result.exit_code == 2, (arguments, result.stdout, result.stderr)
        assert result.stderr, arguments


def test_one_request_is_recorded_and_explained_afterwards(command_line, deployment, recorded, tmp_path):
    asked = next(c for c in Capture(recorded).messages() if c.schema == "generate_request/1" and "n" in c.body)
    name = asked.body["request_id"]
    result = here("explain", name, "-f", str(recorded), "--brief")
    assert result.exit_code == 0
    assert "begins choice 2 on executor-0" in result.stdout
    result = here("explain", name, "--json", *deployment.on_this_bus)
    story = json.loads(result.stdout)
    assert "FINAL" in story["events"][-1]["text"]
    path = tmp_path / "one.jsonl.zst"
    assert here("record", "-o", str(path), "--request", name, *deployment.on_this_bus).exit_code == 0
    assert {c.body["request_id"] for c in Capture(path).messages()} == {name}
    for command in (("explain", "nobody"), ("record", "-o", str(path), "--request", "nobody")):
        assert here(*command, *deployment.on_this_bus).exit_code == 1


def test_a_recording_ends_after_its_duration_or_its_requests(command_line, deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    result = here("record", "-o", str(path), "--duration", "0.3", *deployment.on_this_bus)
    assert (result.exit_code, "0 requests ended" in result.stderr) == (0, True)
    recorder = start_recorder(command_line, deployment, path, "--requests", "5", "--filter", "output_chunk,error")
    send(deployment)
    assert recorder.wait(20) == 0
    assert {c.schema for c in Capture(path).messages()} == {"output_chunk/1", "error"}


def test_a_stopped_or_killed_recorder_changes_nothing_for_clients(command_line, deployment, tmp_path):
    usual_s = max(send(deployment) for _ in range(2))
    recorder = start_recorder(command_line, deployment, tmp_path / "a.jsonl.zst")
    os.kill(recorder.pid, signal.SIGSTOP)
    assert send(deployment) < 3 * usual_s + 1
    os.kill(recorder.pid, signal.SIGCONT)
    wait_until(lambda: (tmp_path / "a.jsonl.zst").read_bytes() != b"")
    time.sleep(1.5)
    os.kill(recorder.pid, signal.SIGKILL)
    assert send(deployment) < 3 * usual_s + 1
    capture = Capture(tmp_path / "a.jsonl.zst")
    assert any(c.schema == "output_chunk/1" for c in capture.messages())
    assert here("status", *deployment.on_this_bus).exit_code == 0


def test_config_diff_finds_what_differs_wherever_it_came_from_and_shows_no_secret(
    command_line, deployment, recorded, tmp_path
):
    """The second deployment has another file, environment and options, another version, and another processor."""
    (tmp_path / "p.yaml").write_text("scheduler: {max_num_seqs: 7}\n")
    environment = {"NATTERJACK_SCHEDULER__PLAN_DEPTH": "3", "NATTERJACK_GATEWAY__API_KEYS": "sk-hidden"}
    cpu_info = Path("/proc/cpuinfo").read_text().replace("flags\t\t:", "flags\t\t: amx_toad", 1)
    other = ChangedCommandLine(tmp_path).change(MACHINE, **environment).move_to(cpu_info)
    path = tmp_path / "two.zst"
    try:
        options = (*QUICK, "-c", str(tmp_path / "p.yaml"), "--set", "scheduler.lookahead_tokens=9")
        second = other.up(*options, "--set", "bus.prefix=two")
        url = second.nats_url.replace("nats://", "nats://user:hunter2@")
        result = here("config", "diff", deployment.nats_url, f"{url}/two", "--json")
        found = {item["key"]: (item["a"], item["b"]) for item in json.loads(result.stdout)}
        assert result.exit_code == 1
        assert found["scheduler.max_num_seqs"][1] == {"value": 7, "source": "file"}
        assert found["scheduler.plan_depth"][1] == {"value": 3, "source": "environment"}
        assert found["scheduler.lookahead_tokens"][1] == {"value": 9, "source": "--set"}
        assert found["bus.prefix"][1]["value"] == "two"
        assert found["build.version"][1]["value"] == "9.9.9"
        ours, others = (set(side["value"]) for side in found["build.cpu_features"])
        assert (others - ours, ours - others) == ({"amx_toad"}, set())
        assert "capacity.engine" not in found
        shown = here("config", "diff", str(recorded), f"{url}/two")
        assert "scheduler.max_num_seqs (scheduler-0)" in shown.stdout
        assert "only here: amx_toad" in shown.stdout
        here("record", "-o", str(path), *second.on_this_bus, "--set", "bus.prefix=two", "--duration", "0.3")
        everything = result.stdout + shown.stdout + shown.stderr + "".join(str(line) for line in Capture(path))
        assert "gateway.api_keys" in everything
        assert not [secret for secret in ("hunter2", "sk-hidden") if secret in everything]
    finally:
        other.end()


def test_a_command_goes_back_to_the_priority_that_it_had_where_it_may():
    code = (
        "import os; from services.cli.record import lower_priority\n"
        "with lower_priority(10): print(os.getpriority(os.PRIO_PROCESS, 0))\n"
        "with lower_priority(3): print(os.getpriority(os.PRIO_PROCESS, 0))\n"
    )
    lowest = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert lowest.stdout.splitlines()[0] == "10"
    assert int(lowest.stdout.splitlines()[1]) in (3, 10)


def test_config_diff_of_files_and_of_a_file_with_what_runs(command_line, deployment, tmp_path):
    (tmp_path / "a.yaml").write_text("gateway: {port: 1}\n")
    (tmp_path / "b.yaml").write_text("gateway: {port: 2}\n")
    result = here("config", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert (result.exit_code, "gateway.port" in result.stdout) == (1, True)
    same = here("config", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "a.yaml"))
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "No differences.")
    result = here("config", "diff", str(tmp_path / "a.yaml"), deployment.nats_url, *QUICK)
    assert "executor.step_time_s" not in result.stdout
    assert "gateway.port" in result.stdout
