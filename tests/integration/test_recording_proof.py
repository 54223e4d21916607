"""A recording of more than two hundred mixed requests to the real model replays equal: at its own speed, at full speed,
against a fresh deployment; and against another engine wherever engines promise anything to each other."""

import asyncio
import json

import pytest
from opentelemetry.sdk.trace import TracerProvider
from typer.testing import CliRunner

from services.cli.app import app
from services.runtime.bus import open_bus
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.command_line import CommandLine
from tests.integration.mixed_traffic import send_mixed
from tests.integration.test_cli_recording import start_recorder, stop
from tests.integration.varied_traffic import send_everything

pytestmark = pytest.mark.slow
BLOCKS = ("--set", "executor.num_blocks=2048")
NATIVE = ("--set", "executor.engine=native")
REFERENCE = ("--set", "executor.engine=reference")
PATIENT = ("--concurrency", "16", "--timeout", "1800")


def send(deployment, traffic):
    async def main():
        settings = BusSettings(url=deployment.nats_url)
        async with open_bus(settings, Tracing(TracerProvider()), name="traffic") as bus:
            return await traffic(bus)

    return asyncio.run(main())


def replayed(path, deployment, *options: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["replay", str(path), "--against", deployment.nats_url, "--json", *options])
    print(path.name, options, result.exit_code, result.stderr, result.exception)
    found = json.loads(result.stdout)
    print({key: value for key, value in found.items() if key not in ("differences", "unpromised", "before", "after")})
    return result.exit_code, found


@pytest.fixture
def up(tmp_path_factory):
    """Start deployments of a test's own; the one before is stopped, for two engines on one machine are slow."""
    command_lines: list[CommandLine] = []

    def start(*options: str):
        for command_line in command_lines:
            command_line.end()
        command_lines.append(CommandLine(tmp_path_factory.mktemp("proof")))
        return command_lines[-1].up(*BLOCKS, *options)

    yield start
    for command_line in command_lines:
        command_line.end()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The recording, and how many requests it holds."""
    command_line = CommandLine(tmp_path_factory.mktemp("recorded"))
    try:
        deployment = command_line.up(*BLOCKS, *NATIVE)
        path = command_line.directory / "native.zst"
        recorder = start_recorder(command_line, deployment, path)
        number = send(deployment, send_mixed)
        assert f"{number} requests ended, nothing missing" in stop(recorder)[1]
    finally:
        command_line.end()
    assert number >= 200
    return path, number


def test_a_fresh_deployment_answers_two_hundred_mixed_requests_as_the_recorded_one(up, recorded):
    path, number = recorded
    deployment = up(*NATIVE)
    for options in (("--speed", "original"), ("--speed", "max")):
        code, found = replayed(path, deployment, *options)
        assert (code, found["differences"], found["skipped"]) == (0, [], {})
        assert found["num_compared"] == number
        assert found["rules"]["is_same_engine"] is True


def test_the_reference_engine_answers_them_equally_wherever_that_is_promised(up, recorded):
    path, number = recorded
    code, found = replayed(path, up(*REFERENCE), "--speed", "max", *PATIENT)
    assert (code, found["differences"], found["num_compared"]) == (0, [], number)
    assert found["rules"]["is_same_engine"] is False
    others = {difference["request_id"] for difference in found["unpromised"]}
    print(f"{number - len(others)} of {number} requests have the same tokens on both engines")
    assert len(others) < number / 2


def test_the_reference_engine_answers_as_itself(up, tmp_path):
    path, deployment = tmp_path / "reference.zst", up(*REFERENCE)
    recorder = start_recorder(deployment.command_line, deployment, path)
    send(deployment, send_everything)
    stop(recorder)
    code, found = replayed(path, up(*REFERENCE), "--speed", "max", *PATIENT)
    assert (code, found["differences"], found["rules"]["is_same_engine"]) == (0, [], True)
    assert found["num_compared"] > 20
