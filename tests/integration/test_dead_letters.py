"""What the deployment gives up ends with an error for its client, and lies there for a person to look at and replay."""

import asyncio
import json
from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import PATH_ROLES
from schemas.generation import OutputSpec, WorkItem
from schemas.output import OutputChunk
from schemas.sampling import SamplingParams
from schemas.subjects import subject_token
from services.runtime.bus import Bus, open_bus
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from services.runtime.transport import MESSAGE_ID_HEADER
from tests.integration.command_line import CommandLine
from tests.integration.conftest import Deployment


def work(request_id: str) -> WorkItem:
    spec = OutputSpec(request_id=request_id, model="smol", created_s=1.0, num_prompt_tokens=3)
    return WorkItem(
        request_id=request_id,
        model="smol",
        created_s=1.0,
        prompt_token_ids=tuple(b"abc"),
        max_tokens=6,
        sampling=SamplingParams(temperature=0),
        tokenizer="tokenizer-0",
        output=spec,
    )


async def final_of(bus: Bus, request_id: str) -> tuple[str, OutputChunk]:
    """Wait for a request's final chunk; returns the text before it as well."""
    async with asyncio.timeout(20):
        while True:
            raw = await bus.transport.last(bus.subjects.out_stream, bus.subjects.out(request_id))
            if raw is not None and b'"final":true' in raw.body:
                break
            await asyncio.sleep(0.05)
    newest = await bus.last(bus.subjects.out_stream, bus.subjects.out(request_id), OutputChunk)
    assert newest is not None
    try:
        stored = await bus.read(bus.subjects.out_stream, bus.subjects.out(request_id), OutputChunk)
        return "".join(delta.text for entry in stored for delta in entry.message.choices), newest.message
    except Exception:  # the log was made unreadable
        return "", newest.message


async def test_given_up_request_ends_with_an_error_and_can_be_replayed(
    start_echo: Callable[..., Deployment], tmp_path
) -> None:
    """A log that cannot be read: damage, or another version's."""
    deployment = start_echo("scheduler.max_deliver=1")
    command_line = CommandLine(tmp_path)
    settings = BusSettings(url=deployment.nats_url, prefix=deployment.prefix)
    async with open_bus(settings, Tracing(TracerProvider()), name="test") as bus, Registry(bus) as registry:
        await registry.wait_ready(PATH_ROLES, 30)
        empty = await asyncio.to_thread(command_line.run, "dead-letters", "list", *deployment.settings())
        assert (empty.returncode, empty.stdout) == (0, "")
        subject, headers = bus.subjects.work("smol", "normal"), {MESSAGE_ID_HEADER: subject_token("unreadable")}
        await bus.transport.append(subject, b"{", headers)
        _, final = await final_of(bus, "unreadable")
        assert final.error is not None
        assert final.error.code == "internal_error"
        await bus.transport.append(bus.subjects.out("damaged"), b"{", {})
        await bus.append(subject, work("damaged"), message_id="damaged")
        _, final = await final_of(bus, "damaged")
        assert final.error is not None

        def run(*arguments: str) -> str:
            result = command_line.run("dead-letters", *arguments, *deployment.settings())
            assert result.returncode == 0, result.stderr
            return result.stdout

        lines = (await asyncio.to_thread(run, "list")).splitlines()
        assert [line.split("  ")[1] for line in lines] == ["unreadable", "damaged"]
        shown = json.loads(await asyncio.to_thread(run, "show", "damaged"))
        assert shown["work"]["prompt_token_ids"] == list(b"abc")
        replayed = (await asyncio.to_thread(run, "replay", "damaged")).partition(":")[0]
        text, final = await final_of(bus, replayed)
        assert (text, final.error) == ("abcabc", None)
        for arguments in (("show", "nothing"), ("replay", "unreadable")):
            failure = await asyncio.to_thread(command_line.run, "dead-letters", *arguments, *deployment.settings())
            assert failure.returncode == 1
    command_line.end()
