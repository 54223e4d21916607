"""A deployment of ours to be measured: `natterjack up` in a process of its own, so that its cost is counted apart.

However this process ends, the deployment ends with it.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from services.bench.watch import Watch, watching
from services.runtime import launcher
from services.runtime.bus import Bus, open_bus
from services.runtime.generation import finish_cancelling
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing

UP = (sys.executable, "-m", "services.cli", "up")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SETTLE_S = 1.0
"""After the start, so that nothing of it is measured."""


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment that is ready."""

    http_url: str
    bus: Bus
    watch: Watch


@contextlib.asynccontextmanager
async def running(settings: Iterable[str]) -> AsyncIterator[Running]:
    """Start a deployment with `key=value` settings on free ports, watch it, and stop it at the end."""
    everything = [*settings, "gateway.port=0", "bus.port=0"]
    options = [word for setting in everything for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="natterjack-bench-") as directory:
        log_path = Path(directory) / "up.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *launcher.wrap([*UP, "--set", f"supervisor.state_dir={directory}/state", *options]),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            http_url, nats_url = await _greeted(process, log_path)
            async with _joined(nats_url) as (bus, watch):
                await asyncio.sleep(SETTLE_S)
                yield Running(http_url, bus, watch)
        finally:
            await _stop(process)


async def _greeted(process: asyncio.subprocess.Process, log_path: Path) -> tuple[str, str]:
    """Read what `up` says until it is ready, and return where it is."""
    assert process.stdout is not None
    words: list[str] = []
    async with asyncio.timeout(READY_TIMEOUT_S):
        while "stops" not in words:
            line = await process.stdout.readline()
            if not line:
                raise SystemExit(f"the deployment did not start:\n{log_path.read_text(errors='replace')}")
            words += line.decode().split()
    return words[words.index("HTTP") + 1].removesuffix("/v1"), words[words.index("NATS") + 1]


@contextlib.asynccontextmanager
async def _joined(nats_url: str) -> AsyncIterator[tuple[Bus, Watch]]:
    async with (
        open_bus(BusSettings(url=nats_url), Tracing(TracerProvider()), name="bench") as bus,
        Registry(bus) as registry,
        watching(bus, registry) as watch,
    ):
        yield bus, watch
        await finish_cancelling()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
