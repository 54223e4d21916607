"""`natterjack shadow`: two real pipelines under two prefixes on one nats-server, the second with a changed sampler."""

import asyncio
import contextlib
import json
import signal
import urllib.request

import pytest
from opentelemetry.sdk.trace import TracerProvider
from typer.testing import CliRunner

from schemas.generation import GenerateRequest
from schemas.output import OutputChunk
from services.cli import shadow_run
from services.cli.app import app
from services.runtime.bus import Bus, open_bus
from services.runtime.generation import generate
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.changed_build import SAMPLER, ChangedCommandLine
from tests.integration.command_line import ECHO, CommandLine, wait_until
from tests.integration.varied_traffic import send_all, send_and_leave, varied_requests

QUICK = (*ECHO, "--set", "executor.step_time_s=0.001", "--set", "executor.num_blocks=1024")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The live deployment; the second one, whose sampler is another one for requests with `min_p`, is beside it."""
    command_line = CommandLine(tmp_path_factory.mktemp("live"))
    other = ChangedCommandLine(tmp_path_factory.mktemp("other")).change(SAMPLER)
    try:
        deployment = command_line.up(*QUICK)
        other.up(*QUICK, "--set", f"bus.url={deployment.nats_url}", "--set", "bus.prefix=two")
        yield deployment
    finally:
        other.end()
        command_line.end()


class Shadow:
    """A running `natterjack shadow`."""

    def __init__(self, deployment, fraction: float, *options: str) -> None:
        arguments = ("shadow", str(fraction), "--to", "two", *deployment.on_this_bus, *options)
        self.process = deployment.command_line.start(*arguments)
        self.greeting = self.process.stderr.readline()
        assert "Mirroring" in self.greeting, self.greeting + self.process.stderr.read()

    def page(self) -> str:
        url = self.greeting.split("metrics on ")[1].split(";")[0]
        return urllib.request.urlopen(url, timeout=5).read().decode()

    def end(self) -> tuple[int, str]:
        stdout, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stdout or stderr

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        return self.end()


def run(deployment, traffic, prefix: str = "nj"):
    """Run a coroutine function with a bus of the deployment."""

    async def main():
        settings = BusSettings(url=deployment.nats_url, prefix=prefix)
        async with open_bus(settings, Tracing(TracerProvider()), name="traffic") as bus:
            return await traffic(bus)

    return asyncio.run(main())


def named(requests, label: str):
    return [r.model_copy(update={"request_id": f"{label}-{n}"}) for n, r in enumerate(requests)]


def test_requests_cancellations_and_choices_agree_between_two_equal_pipelines(live):
    requests = named([r for r in varied_requests(chat=False) if not r.min_p], "agree")
    shadow = Shadow(live, 1.0, "--requests", str(len(requests) + 1), "--json")
    story = GenerateRequest(model="smol", prompt="Once upon", max_tokens=4000, ignore_eos=True, request_id="left")

    async def traffic(bus: Bus) -> None:
        await asyncio.gather(send_all(bus, requests), send_and_leave(bus, story, 3))

    run(live, traffic)
    code, said = shadow.end()
    found = json.loads(said)
    assert (code, found["equal"], found["differences"]) == (0, True, [])
    assert (found["num_agreed"], found["num_ended_by_time"], found["num_dropped"]) == (len(requests) + 1, 1, 0)
    assert (found["token_share"], found["num_tokens"] > 200) == (1.0, True)

    async def end_of_the_other(bus: Bus) -> OutputChunk:
        return (await bus.last(bus.subjects.out_stream, bus.subjects.out("left"), OutputChunk)).message

    final = run(live, end_of_the_other, "two")
    assert (final.final, final.error.code) == (True, "cancelled")


def test_a_changed_sampler_is_caught_with_its_position_and_shows_in_the_metrics(live):
    requests = named(varied_requests(chat=False), "sampler")
    shadow = Shadow(live, 1.0, "--metrics-port", "0")
    run(live, lambda bus: send_all(bus, requests))
    agreed, different = (
        f'verdict="{verdict}"}} {n}' for verdict, n in (("agreed", len(requests) - 1), ("different", 1))
    )
    wait_until(lambda: agreed in shadow.page() and different in shadow.page())
    page = shadow.page()
    assert 'natterjack_shadow_differences_total{model_name="",what="tokens"} 1' in page
    assert "natterjack_shadow_requests_open" in page
    code, said = shadow.interrupt()
    assert code == 1
    assert "choice 0: tokens, first different at token 5" in said
    assert f"{len(requests) - 1} of {len(requests)}" in said


@pytest.mark.slow
def test_a_client_does_not_notice_a_stopped_shadow(live):
    shadow = Shadow(live, 1.0)
    shadow.process.send_signal(signal.SIGSTOP)
    try:

        async def traffic(bus: Bus) -> int:
            number = 0
            async with generate(bus, GenerateRequest(model="smol", prompt="Hi", max_tokens=30)) as stream:
                async for chunk in stream:
                    number += sum(len(choice.token_ids) for choice in chunk.choices)
            return number

        assert run(live, traffic) == 30
    finally:
        shadow.process.kill()


def test_what_cannot_be_mirrored_ends_with_code_2(live, monkeypatch):
    monkeypatch.setattr(shadow_run, "READY_TIMEOUT_S", 0.2)
    for options in (("--to", "nobody"), ("--to", "nj"), ("--to", "No Prefix")):
        done = CliRunner().invoke(app, ["shadow", "0.5", *options, *live.on_this_bus])
        assert (done.exit_code, bool(done.stderr)) == (2, True), options
    monkeypatch.setattr(shadow_run, "lower_priority", lambda niceness: contextlib.nullcontext())
    done = CliRunner().invoke(app, ["shadow", "0", "--to", "two", *live.on_this_bus, "--duration", "0.2"])
    assert (done.exit_code, "0 requests" in done.stdout) == (2, True), done.output
