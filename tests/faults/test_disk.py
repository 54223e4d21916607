"""A full disk and an unusable one: accepted work waits and goes on, new work is refused, and the cause is named."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from schemas.control import PATH_ROLES, Cancel
from schemas.errors import NatterjackError
from services.runtime.bus import open_bus
from services.runtime.generation import generate
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.faults.deployment import ECHO as ECHO_ENGINE
from tests.faults.deployment import Deployment
from tests.faults.streams import echo_streams
from tests.integration.command_line import ECHO, CommandLine
from tests.integration.conftest import ECHO as ECHO_SETTINGS
from tests.integration.conftest import start_deployment

DISK_BYTES = 48 << 20
SLOW_ECHO = (*ECHO_ENGINE, "executor.step_time_s=0.02")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which a test may fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; returns the file to remove."""
    ballast = disk / "ballast"
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(file, b"x" * 4096):
            pass
    except OSError:
        os.close(file)
    return ballast


async def test_full_disk_refuses_new_work_and_loses_no_accepted_work(small_disk: Path, tmp_path: Path) -> None:
    settings = ("executor.step_time_s=0.02", f"bus.store_dir={small_disk}")
    deployment = start_deployment(tmp_path, *ECHO_SETTINGS, *settings)
    bus_settings = BusSettings(url=deployment.nats_url)
    try:
        async with (
            open_bus(bus_settings, Tracing(TracerProvider()), name="test") as bus,
            Registry(bus) as registry,
        ):
            await registry.wait_ready(PATH_ROLES, 30)
            streams = echo_streams(range(8), 150)
            running = [asyncio.create_task(stream.run(bus)) for stream in streams]
            await asyncio.sleep(1)
            ballast = await asyncio.to_thread(fill, small_disk)
            await asyncio.sleep(1)
            asked_s = time.monotonic()
            with pytest.raises(NatterjackError) as refused:
                async with generate(bus, echo_streams([99], 300)[0].request):
                    pass
            assert refused.value.http_status == 503
            assert time.monotonic() - asked_s < 11
            ballast.unlink()
            await asyncio.gather(*running)
            assert [stream.problem for stream in streams] == [""] * len(streams)
            after = echo_streams([100], 20)[0]
            await after.run(bus)
            assert after.problem == ""
    finally:
        deployment.stop()


@pytest.mark.slow
async def test_external_server_whose_disk_was_full_goes_on_after_its_restart(small_disk: Path, tmp_path: Path) -> None:
    """It is not ours to restart: the error says what to do, and everything that was accepted goes on afterwards."""
    async with Deployment(tmp_path, SLOW_ECHO, broker_directory=small_disk) as deployment:
        streams = echo_streams(range(8), 150)
        running = [asyncio.create_task(stream.run(deployment.bus)) for stream in streams]
        await asyncio.sleep(1)
        ballast = await asyncio.to_thread(fill, small_disk)
        await asyncio.sleep(1)
        with pytest.raises(NatterjackError, match=r"make room and restart") as refused:
            await deployment.bus.append(deployment.bus.subjects.dead("x"), Cancel(request_id="x" * 4096))
        assert refused.value.http_status == 503
        ballast.unlink()
        deployment.broker.kill()
        await asyncio.to_thread(deployment.broker.start)
        await asyncio.gather(*running)
        assert [stream.problem for stream in streams] == [""] * len(streams)


def test_directory_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    for key in ("supervisor.state_dir", "bus.store_dir"):
        (tmp_path / "file").write_text("no directory")
        result = command_line.run("up", *ECHO, "--set", "bus.port=0", "--set", f"{key}={tmp_path / 'file' / 'below'}")
        assert result.returncode != 0
        assert str(tmp_path / "file") in result.stderr, result.stderr
    command_line.end()
