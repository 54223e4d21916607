"""The mirror without pipelines: what it hears in another order, cannot read, or must forget; and how it leaves."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.codec import encode, schema_of
from schemas.errors import Unavailable
from schemas.generation import GenerateRequest, OutputSpec, WorkItem
from schemas.sampling import SamplingParams
from schemas.subjects import Subjects
from services.recording import shadowing
from services.recording.agreement import Agreement
from services.recording.shadowing import Shadow, ShadowLimits
from services.runtime.bus import Bus
from services.runtime.memory_transport import MemoryServer, MemoryTransport
from services.runtime.telemetry import Tracing

Eventually = Callable[..., Awaitable[None]]


class Deaf(MemoryTransport):
    """A connection that cannot listen to a request's output."""

    async def subscribe(self, subject, callback, queue=None):
        if ".live." in subject:
            raise Unavailable("Nothing can be heard.")
        return await super().subscribe(subject, callback, queue)


class Stage:
    """A live bus that is spoken on by hand, a second one where nobody is, and a shadow between them."""

    def __init__(self, tracing: Tracing, transport: type[MemoryTransport] = MemoryTransport, **limits: float) -> None:
        server = MemoryServer()
        self.live, other = (Bus(transport(server), Subjects(prefix), tracing) for prefix in ("nj", "two"))
        self.agreement = Agreement()
        self.shadow = Shadow(self.live, other, ShadowLimits(**{"fraction": 1.0, **limits}), self.agreement)

    async def say(
        self, subject: str, body: bytes, schema: str = "generate_request/1", reply: str | None = None
    ) -> None:
        await self.live.transport.publish(subject, body, {"Nj-Schema": schema}, reply)

    async def ask(self, name: str | None, body: bytes | None = None, reply: str | None = None) -> None:
        request = GenerateRequest(model="smol", request_id=name, prompt="Hi", max_tokens=3)
        await self.say(self.live.subjects.generate("smol"), body or encode(request), reply=reply)

    async def accept(self, name: str, reply: str | None = None) -> None:
        spec = OutputSpec(request_id=name, model="smol", created_s=1.0, num_prompt_tokens=2, n=1, stop=(), reply=reply)
        work = WorkItem(
            request_id=name,
            model="smol",
            created_s=1.0,
            prompt_token_ids=(72, 105),
            max_tokens=3,
            sampling=SamplingParams(seed=7),
            tokenizer="tokenizer-0",
            output=spec,
        )
        await self.say(self.live.subjects.work("smol", "normal"), encode(work), schema_of(work))


async def test_a_request_is_mirrored_whichever_is_heard_first(tracing: Tracing, eventually: Eventually) -> None:
    stage = Stage(tracing)
    async with stage.shadow:
        await stage.ask("in-order")
        await stage.accept("in-order")
        await stage.accept("work-first")
        await stage.ask("work-first")
        await stage.accept("named-by-its-tokenizer", reply="_INBOX.me")
        await stage.ask(None, reply="_INBOX.me")
        await eventually(lambda: stage.shadow.num_open == 3)
        for name in ("in-order", "work-first"):  # a redelivery, or a client that asks again
            await stage.ask(name)
            await stage.accept(name)
        await stage.ask("last")
        await stage.accept("last")
        await eventually(lambda: stage.shadow.num_open == 4)


async def test_leaving_ends_what_is_mirrored_without_waiting_for_it(tracing: Tracing, eventually: Eventually) -> None:
    stage = Stage(tracing)
    async with asyncio.timeout(5):
        async with stage.shadow:
            await stage.ask("endless")
            await stage.accept("endless")
            await eventually(lambda: stage.shadow.num_open == 1)
    assert (stage.shadow.num_open, stage.agreement.num_compared, stage.agreement.num_dropped) == (0, 0, 0)
    await stage.ask("late")
    await stage.accept("late")
    assert stage.shadow.num_open == 0


async def test_what_cannot_be_read_is_passed_over_and_the_next_request_is_mirrored(
    tracing: Tracing, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tracing)
    async with stage.shadow:
        for body in (b"{", b"[1]", b'"text"', b'{"prompt":"no id, and nowhere to answer"}'):
            await stage.ask(None, body)
        await stage.say(stage.live.subjects.work("smol", "normal"), b"{}", "work_item/1")
        await eventually(lambda: "a work item cannot be read" in caplog.text)
        await stage.ask("good")
        await stage.accept("good")
        await eventually(lambda: stage.shadow.num_open == 1)


async def test_a_request_that_this_version_cannot_send_is_dropped_and_counted(
    tracing: Tracing, eventually: Eventually
) -> None:
    """The live tokenizer is a newer one, which takes what the contract here does not."""
    stage = Stage(tracing)
    async with stage.shadow:
        await stage.ask("newer", b'{"model":"smol","request_id":"newer","prompt":"Hi","max_tokens":"a few"}')
        await stage.accept("newer")
        await eventually(lambda: stage.agreement.num_dropped)
    assert (dict(stage.agreement.dropped), stage.shadow.num_open) == ({"unreadable": 1}, 0)


async def test_a_live_output_that_cannot_be_heard_is_no_difference(
    tracing: Tracing, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tracing, Deaf)
    async with stage.shadow:
        await stage.ask("unheard")
        await stage.accept("unheard")
        await eventually(lambda: stage.agreement.num_dropped)
    assert (dict(stage.agreement.dropped), stage.agreement.num_compared) == ({"unavailable": 1}, 0)
    assert "a request was not compared: Nothing can be heard." in caplog.text


async def test_a_shadow_forgets_requests_that_were_never_accepted(tracing: Tracing, eventually: Eventually) -> None:
    """What is remembered has a limit: the oldest goes first."""
    stage = Stage(tracing)
    number = shadowing.MAX_HELD + 1
    async with stage.shadow:
        for n in range(number):
            await stage.ask(f"refused-{n}", b'{"request_id":"refused-%d","model":"smol","prompt":"Hi"}' % n)
        for name in ("refused-0", f"refused-{number - 1}"):
            await stage.accept(name)
        await eventually(lambda: stage.shadow.num_open)
        assert stage.shadow.num_open == 1
