"""An operator's commands against a real deployment: what they do, what they print, how they end."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from schemas.control import ROLES
from services.cli.command_round import Order, carry_out
from services.runtime.bus import open_bus
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.faults.streams import echo_streams
from tests.integration.command_line import ECHO, CommandLine, RunningDeployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDeployment]:
    command_line = CommandLine(tmp_path_factory.mktemp("operations"))
    yield command_line.up(*ECHO, "--set", "executor.step_time_s=0.01")
    command_line.end()


def tell(deployment: RunningDeployment, *arguments: str) -> tuple[int, str, str]:
    ended = deployment.command_line.run(*arguments, *deployment.on_this_bus)
    return ended.returncode, ended.stdout, ended.stderr


def test_rolling_restart_of_every_service_under_load_loses_nothing(deployment: RunningDeployment) -> None:
    async def roll() -> list[str]:
        settings = BusSettings(url=deployment.nats_url)
        async with open_bus(settings, Tracing(TracerProvider()), name="test") as bus:
            streams = echo_streams(range(12), 300)
            running = [asyncio.create_task(stream.run(bus)) for stream in streams]
            code, said, error = await asyncio.to_thread(tell, deployment, "drain", "tokenizer-0", "--wait", "15")
            assert (code, said) == (0, "tokenizer-0: state draining\n"), error
            for role in set(ROLES) - {"tokenizer"}:
                outcome = await carry_out(settings, Order("drain", role, wait_s=15.0))
                assert outcome.exit_code == 0, outcome
            await asyncio.gather(*running)
            return [stream.problem for stream in streams if stream.problem]

    before = {role: deployment.pid_of(f"{role}-0") for role in ROLES}
    assert asyncio.run(roll()) == []
    for role in ROLES:
        deployment.wait_replaced(f"{role}-0", before[role])
    code, _, _ = tell(deployment, "status", "--wait", "20")
    assert code == 0


def test_pause_is_shown_and_ends_with_resume(deployment: RunningDeployment) -> None:
    code, said, _ = tell(deployment, "pause", "--json")
    assert code == 0
    answer = json.loads(said)
    assert (answer["ok"], answer["missing"], answer["error"]) == (True, [], None)
    assert answer["replies"][0]["instance"] == "scheduler-0"
    assert answer["replies"][0]["result"]["in_flight"] == "finish"
    assert "paused: new requests wait" in tell(deployment, "status")[1]
    assert tell(deployment, "resume")[:2] == (0, "scheduler-0: state running, model smol\n")
    assert "paused" not in tell(deployment, "status")[1]


def test_who_cannot_do_a_command_says_so(deployment: RunningDeployment) -> None:
    code, _, error = tell(deployment, "control", "flush-cache", "gateway")
    assert code == 1
    assert "gateway-0: A gateway has no command 'flush_cache'" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "toaster"), "there is no 'toaster'; there are: gateway"),
        (("control", "explode"), "there is no command 'explode'; there are: drain"),
        (("control", "drain"), "say which role or instance"),
        (("control", "set-log-level", "--arg", "debug"), "is not KEY=VALUE"),
    ],
)
def test_target_or_command_that_there_is_not_is_wrong_usage(
    deployment: RunningDeployment, arguments: tuple[str, ...], words: str
) -> None:
    code, _, error = tell(deployment, *arguments)
    assert code == 2
    assert words in error


def test_without_a_deployment_nobody_answers(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    ended = command_line.run("pause", "--json", "--set", "bus.port=1")
    assert ended.returncode == 3
    assert json.loads(ended.stdout)["ok"] is False
    command_line.end()
