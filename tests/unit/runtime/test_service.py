"""The life of a service as its parent sees it: a real process, a real bus, its exit code and its registry entry."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.control import Cancel, EffectiveConfig, Registration
from schemas.subjects import subject_token
from services.runtime.bus import Bus
from services.runtime.registry import Registry
from services.runtime.service import EXIT_BUS, EXIT_CONFIGURATION, EXIT_FAILED, EXIT_STOPPED, run, version
from services.runtime.settings import CommonSettings, child_environment

Eventually = Callable[..., Awaitable[None]]

SERVICE = textwrap.dedent(
    """
    import asyncio, sys
    from schemas.control import Cancel
    from schemas.errors import Unavailable
    from services.runtime.service import StartFailed, run
    from services.runtime.settings import CommonSettings

    behaviour = sys.argv.pop(1)

    class Tiny:
        def __init__(self, settings, context):
            self.context = context
            self.subscription = None
            self.ended = asyncio.Event()

        async def start(self):
            self.context.progress("loading model", 0.51239, "half of it")
            print("start", self.context.instance, len(self.context.incarnation), flush=True)
            if behaviour == "cannot start":
                raise StartFailed("The model file is broken. Get another one.")
            if behaviour == "loses the bus":
                raise Unavailable("The bus went away.")
            if behaviour == "bug at start":
                raise KeyError("oops")
            if behaviour == "slow start":
                await asyncio.sleep(60)
            subjects = self.context.bus.subjects
            self.subscription = await self.context.bus.subscribe(subjects.cancel_all, Cancel, self.receive)

        def receive(self, incoming):
            print("received", incoming.message.request_id, flush=True)
            self.ended.set()

        async def wait(self):
            if behaviour == "fails at work":
                raise StartFailed("The device is gone.")
            if behaviour == "ends by itself":
                await self.ended.wait()
                return
            await asyncio.Event().wait()

        async def drain(self):
            print("drain", flush=True)
            if behaviour == "drains for ever":
                await asyncio.Event().wait()

        async def stop(self):
            print("stop", flush=True)

        def commands(self):
            return {"shout": self.shout}

        async def shout(self, arguments):
            return {"said": str(arguments["word"]).upper()}

    from services.runtime import service
    service.DRAIN_TIMEOUT_S = 0.2

    sys.exit(run("executor", CommonSettings, Tiny))
    """
)


@asynccontextmanager
async def started(tmp_path: Path, bus: Bus, url: str, behaviour: str, *arguments: str) -> AsyncIterator[Any]:
    """Run the tiny service in a process of its own."""
    script = tmp_path / "tiny.py"
    script.write_text(SERVICE)
    settings = ["--set", f"bus.url={url}", "--set", f"bus.prefix={bus.subjects.prefix}", "--instance", "executor.0"]
    settings += ["--set", "bus.heartbeat_s=0.2", "--set", "bus.silent_after_s=0.8"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        behaviour,
        *settings,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def outcome(process: Any) -> tuple[int, list[str], str]:
    """Wait for the end: exit code, lines of stdout, stderr."""
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, out.decode().splitlines(), err.decode()


def state_of(registry: Registry) -> str | None:
    entries = registry.entries()
    return entries[0].registration.state if entries else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_signal_drains_stops_and_leaves_the_registry(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, eventually: Eventually, number: signal.Signals
) -> None:
    bus = await connect_nats_bus()
    states: list[str] = []
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, "works") as process:
        registry.listen(lambda entry, name: states.append("left" if entry is None else entry.state))
        await eventually(lambda: registry.missing(["executor"]) == [], timeout_s=20)
        (entry,) = registry.entries()
        assert entry.registration.instance == "executor.0"
        assert entry.registration.pid == process.pid
        assert entry.registration.version == version()
        assert (entry.registration.stage, entry.registration.progress) == ("ready", 1.0)
        await bus.publish(bus.subjects.cancel("x"), Cancel(request_id="x"))  # ready: the subscription is live
        assert (await process.stdout.readline()).startswith(b"start executor.0 32")
        assert await process.stdout.readline() == b"received x\n"
        process.send_signal(number)
        code, lines, err = await outcome(process)
        assert (code, lines) == (EXIT_STOPPED, ["drain", "stop"]), err
        await eventually(lambda: state_of(registry) is None)
    assert [state for number, state in enumerate(states) if state not in states[:number]][-3:] == [
        "ready",
        "draining",
        "left",
    ]
    assert await bus.kv_entries(bus.subjects.registry, Registration) == []


async def test_effective_configuration_is_published_with_sources(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path
) -> None:
    bus = await connect_nats_bus()
    async with started(tmp_path, bus, nats_server.url, "ends by itself", "--set", "model.name=frog") as process:
        assert await process.stdout.readline()
        stored = await bus.kv_get(bus.subjects.config, subject_token("executor.0"), EffectiveConfig)
    assert stored is not None
    values = stored.message.values
    assert (values["model.name"].value, values["model.name"].source) == ("frog", "--set")
    assert values["telemetry.log_level"].source == "default"


async def test_service_that_ends_by_itself_is_drained_and_stopped(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, eventually: Eventually
) -> None:
    bus = await connect_nats_bus()
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, "ends by itself") as process:
        await eventually(lambda: registry.missing(["executor"]) == [], timeout_s=20)
        await bus.publish(bus.subjects.cancel("x"), Cancel(request_id="x"))
        code, lines, _ = await outcome(process)
    assert code == EXIT_STOPPED
    assert lines[-3:] == ["received x", "drain", "stop"]


@pytest.mark.parametrize(
    ("behaviour", "code", "cause"),
    [
        ("cannot start", EXIT_FAILED, "The model file is broken. Get another one."),
        ("fails at work", EXIT_FAILED, "The device is gone."),
        ("loses the bus", EXIT_BUS, "The bus went away."),
    ],
)
async def test_failure_is_told_in_the_registry_on_stderr_and_by_the_exit_code(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, behaviour: str, code: int, cause: str
) -> None:
    bus = await connect_nats_bus()
    failed: list[str] = []
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, behaviour) as process:
        registry.listen(lambda entry, name: failed.append(entry.detail) if entry and entry.state == "failed" else None)
        actual, lines, err = await outcome(process)
    assert actual == code
    assert lines[-1] == "stop"
    assert cause in err
    assert "Traceback" not in err
    assert set(failed) == {cause}


async def test_bug_at_the_start_is_logged_with_its_traceback(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path
) -> None:
    bus = await connect_nats_bus()
    async with started(tmp_path, bus, nats_server.url, "bug at start") as process:
        code, lines, err = await outcome(process)
    assert (code, lines[-1]) == (EXIT_FAILED, "stop")
    assert "KeyError: 'oops'" in err


async def test_signal_during_the_start_ends_it(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, eventually: Eventually
) -> None:
    bus = await connect_nats_bus()
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, "slow start") as process:
        await eventually(lambda: registry.entries() and registry.entries()[0].registration.detail, timeout_s=20)
        (entry,) = registry.entries()
        assert (entry.registration.state, entry.registration.stage) == ("starting", "loading model")
        assert (entry.registration.progress, entry.registration.detail) == (0.512, "half of it")
        process.send_signal(signal.SIGTERM)
        code, lines, _ = await outcome(process)
    assert (code, lines[1:]) == (EXIT_STOPPED, ["stop"])


async def test_drain_that_takes_too_long_is_given_up(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, eventually: Eventually
) -> None:
    bus = await connect_nats_bus()
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, "drains for ever") as process:
        await eventually(lambda: registry.missing(["executor"]) == [], timeout_s=20)
        process.send_signal(signal.SIGTERM)
        code, lines, err = await outcome(process)
    assert (code, lines[-2:]) == (EXIT_STOPPED, ["drain", "stop"])
    assert "drain took longer" in err


def never(settings: CommonSettings, context: object) -> Any:
    raise AssertionError("was built")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "bus.prefixx=a"], "bus.prefix"),
        (["--set", "bus.port=many"], "bus.port"),
        (["--set", "bus.prefix=Not.Legal"], "prefix"),
        (["-c", "does-not-exist.yaml"], "does-not-exist.yaml"),
    ],
)
def test_wrong_configuration_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run("executor", CommonSettings, never, arguments) == EXIT_CONFIGURATION
    assert words in capsys.readouterr().err


def test_unreachable_bus_is_told_with_what_to_do(tmp_path: Path, start_nats: Any) -> None:
    server = start_nats()
    server.kill()
    script = tmp_path / "tiny.py"
    script.write_text(SERVICE)
    arguments = ["--set", f"bus.url={server.url}", "--set", "bus.connect_timeout_s=0.3"]
    ended = subprocess.run(
        [sys.executable, str(script), "works", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        env=child_environment(),
        check=False,
    )
    assert ended.returncode == EXIT_BUS
    assert "Cannot reach NATS" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


async def test_signal_while_the_bus_is_not_there_ends_the_waiting(
    connect_nats_bus: Any, tmp_path: Path, start_nats: Any
) -> None:
    server = start_nats()
    server.kill()
    async with started(tmp_path, await connect_nats_bus(), server.url, "works") as process:
        assert b"Connect" in await process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        code, lines, _ = await asyncio.wait_for(outcome(process), 5)
    assert (code, lines) == (EXIT_STOPPED, [])


async def test_killed_service_is_noticed_by_its_silence(
    connect_nats_bus: Any, nats_server: Any, tmp_path: Path, eventually: Eventually
) -> None:
    bus = await connect_nats_bus()
    async with Registry(bus) as registry, started(tmp_path, bus, nats_server.url, "works") as process:
        await eventually(lambda: registry.missing(["executor"]) == [], timeout_s=20)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert registry.missing(["executor"]) == []  # nobody can know yet
        await eventually(lambda: registry.missing(["executor"]) == ["executor"], timeout_s=8)
