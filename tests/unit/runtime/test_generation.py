"""The client side of a request: what comes out is complete and in order, and leaving early cancels."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from schemas.control import Cancel
from schemas.errors import ContextLengthExceeded, ErrorBody
from schemas.generation import Accepted, GenerateRequest
from schemas.output import ChoiceDelta, OutputChunk, Usage
from services.runtime import generation
from services.runtime.bus import Bus, Incoming
from services.runtime.generation import Generation, finish_cancelling, generate
from services.runtime.transport import NoAnswer, NoResponders, RawMessage

Eventually = Callable[..., Awaitable[None]]
REQUEST = GenerateRequest(model="smol", prompt="x", request_id="req-1")


def chunk(text: str, *, final: bool = False, error: ErrorBody | None = None) -> OutputChunk:
    return OutputChunk(
        request_id="req-1",
        model="smol",
        created_s=1.0,
        epoch=1,
        choices=(ChoiceDelta(text=text),),
        final=final,
        usage=Usage(prompt_tokens=1, completion_tokens=1) if final and error is None else None,
        error=error,
    )


@dataclass
class ScriptedTokenizer:
    """Accepts every request; writes what the test tells it to; counts cancellations."""

    bus: Bus
    requests: list[GenerateRequest] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)

    async def accept(self, incoming: Incoming[GenerateRequest]) -> Accepted:
        self.requests.append(incoming.message)
        request_id = incoming.message.request_id or ""
        return Accepted(request_id=request_id, model="smol", num_prompt_tokens=1, created_s=1.0)

    async def write(self, *texts: str, final: bool = False) -> None:
        for text in texts:
            last = final and text == texts[-1]
            await self.bus.append(self.bus.subjects.out("req-1"), chunk(text, final=last))

    async def write_unheard(self, *texts: str, final: bool = False) -> None:
        """Store chunks whose live copies are lost."""
        listeners, self.server.listeners = self.server.listeners, []
        await self.write(*texts, final=final)
        self.server.listeners = listeners

    @property
    def server(self):  # type: ignore[no-untyped-def]
        return self.bus.transport._server  # type: ignore[attr-defined]


@pytest.fixture
async def tokenizer(memory_bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedTokenizer]:
    monkeypatch.setattr(generation, "POLL_S", 0.05)
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.02)
    scripted = ScriptedTokenizer(memory_bus)
    await memory_bus.serve(memory_bus.subjects.generate("smol"), GenerateRequest, scripted.accept)
    await memory_bus.subscribe(
        memory_bus.subjects.cancel_all, Cancel, lambda incoming: scripted.cancels.append(incoming.message.request_id)
    )
    yield scripted
    await finish_cancelling()


async def texts_of(stream: Generation) -> list[str]:
    return [chunk.choices[0].text async for chunk in stream]


@asynccontextmanager
async def started(tokenizer: ScriptedTokenizer) -> AsyncIterator[Generation]:
    async with generate(tokenizer.bus, REQUEST) as stream:
        yield stream


async def test_chunks_come_in_order_up_to_the_final_one(tokenizer: ScriptedTokenizer) -> None:
    async with started(tokenizer) as stream:
        assert stream.accepted == Accepted(request_id="req-1", model="smol", num_prompt_tokens=1, created_s=1.0)
        await tokenizer.write("a", "b", "c", final=True)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b", "c"]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert chunks[-1].usage is not None
    assert stream.is_finished
    await asyncio.sleep(0.05)
    assert tokenizer.cancels == []


async def test_request_is_sent_for_delivery_by_the_log_with_its_id(tokenizer: ScriptedTokenizer) -> None:
    async with started(tokenizer) as stream:
        await tokenizer.write("a", final=True)
        await texts_of(stream)
    assert [(sent.request_id, sent.deliver) for sent in tokenizer.requests] == [("req-1", "log")]


async def test_request_without_an_id_gets_a_fresh_one(tokenizer: ScriptedTokenizer) -> None:
    for _ in range(2):
        async with generate(tokenizer.bus, GenerateRequest(model="smol", prompt="x")) as stream:
            assert stream.request_id.startswith("req-")
    assert len({sent.request_id for sent in tokenizer.requests}) == 2


async def test_output_from_before_the_acceptance_is_not_missed(tokenizer: ScriptedTokenizer) -> None:
    accept = tokenizer.accept

    async def write_first(incoming: Incoming[GenerateRequest]) -> Accepted:
        await tokenizer.write("a", "b", final=True)
        return await accept(incoming)

    await tokenizer.bus.serve(tokenizer.bus.subjects.generate("early"), GenerateRequest, write_first)
    request = REQUEST.model_copy(update={"model": "early"})
    async with generate(tokenizer.bus, request) as stream:
        assert await texts_of(stream) == ["a", "b"]


@pytest.mark.parametrize("lost", [["a"], ["b"], ["a", "b"], ["b", "c"]], ids="".join)
async def test_gap_is_filled_from_the_log(tokenizer: ScriptedTokenizer, lost: list[str]) -> None:
    async with started(tokenizer) as stream:
        for text in "abcd":
            await (tokenizer.write_unheard if text in lost else tokenizer.write)(text, final=text == "d")
        assert await texts_of(stream) == ["a", "b", "c", "d"]


async def test_lost_final_chunk_is_found_in_the_log_after_a_silence(tokenizer: ScriptedTokenizer) -> None:
    async with started(tokenizer) as stream:
        await tokenizer.write("a")
        await tokenizer.write_unheard("b", final=True)
        assert await asyncio.wait_for(texts_of(stream), 2) == ["a", "b"]


async def test_other_requests_between_are_no_gap(tokenizer: ScriptedTokenizer) -> None:
    bus = tokenizer.bus
    async with started(tokenizer) as stream:
        for text in ("a", "b"):
            await tokenizer.write(text, final=text == "b")
            await bus.append(bus.subjects.out("req-2"), chunk("other"))
        assert await texts_of(stream) == ["a", "b"]


async def test_slow_reader_gets_everything_from_a_bounded_buffer(
    tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_BUFFERED_CHUNKS", 4)
    written = [f"t{number}" for number in range(50)]
    async with started(tokenizer) as stream:
        await tokenizer.write(*written, final=True)
        await asyncio.sleep(0.01)
        assert stream._arrived.qsize() == 4
        assert await texts_of(stream) == written


async def test_silence_and_a_log_that_cannot_be_read_are_waited_out(
    tokenizer: ScriptedTokenizer, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    async with started(tokenizer) as stream:
        name = tokenizer.bus.subjects.out_stream
        lost = tokenizer.server.streams.pop(name)
        reading = asyncio.create_task(texts_of(stream))
        await eventually(lambda: "could not be read" in caplog.text)
        tokenizer.server.streams[name] = lost
        await tokenizer.write("a", final=True)
        assert await asyncio.wait_for(reading, 2) == ["a"]


async def test_unreadable_live_messages_are_ignored(
    tokenizer: ScriptedTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    bus = tokenizer.bus
    async with started(tokenizer) as stream:
        await bus.transport.publish(bus.subjects.live("req-1"), b"{", {})
        forged = RawMessage(bus.subjects.live("req-1"), {}, b"{}")
        stream.receive(forged)
        body = chunk("forged").model_dump_json().encode()
        stream.receive(RawMessage(bus.subjects.live("req-1"), {}, body))  # not from the log: it has no place in it
        await tokenizer.write("a", final=True)
        assert await texts_of(stream) == ["a"]
    assert "unreadable output" in caplog.text


async def test_leaving_early_cancels_until_the_final_chunk_is_seen(
    tokenizer: ScriptedTokenizer, eventually: Eventually
) -> None:
    async with started(tokenizer) as stream:
        await tokenizer.write("a")
        async for _ in stream:
            break
    await eventually(lambda: len(tokenizer.cancels) >= 3)
    await tokenizer.write("b", final=True)
    await finish_cancelling()
    count = len(tokenizer.cancels)
    await asyncio.sleep(0.06)
    assert set(tokenizer.cancels) == {"req-1"}
    assert len(tokenizer.cancels) == count


async def test_cancelling_gives_up_in_the_end(
    tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "CANCEL_ATTEMPTS", 3)
    async with started(tokenizer):
        pass
    await finish_cancelling()
    assert len(tokenizer.cancels) == 3
    assert "no final chunk was seen" in caplog.text


async def test_failure_of_the_reader_cancels_and_comes_out(
    tokenizer: ScriptedTokenizer, eventually: Eventually
) -> None:
    with pytest.raises(ConnectionResetError):
        async with started(tokenizer):
            raise ConnectionResetError
    await eventually(lambda: tokenizer.cancels)
    await tokenizer.write("x", final=True)


async def test_cancelled_reader_cancels_the_request(tokenizer: ScriptedTokenizer, eventually: Eventually) -> None:
    async def read() -> None:
        async with started(tokenizer) as stream:
            await texts_of(stream)

    task = asyncio.create_task(read())
    await eventually(lambda: tokenizer.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: tokenizer.cancels)
    await tokenizer.write("x", final=True)


async def test_error_chunk_ends_the_stream(tokenizer: ScriptedTokenizer) -> None:
    bus = tokenizer.bus
    error = ErrorBody(message="m", type="t", code="cancelled")
    async with started(tokenizer) as stream:
        await bus.append(bus.subjects.out("req-1"), chunk("", final=True, error=error))
        assert [chunk.error async for chunk in stream] == [error]


async def test_refusal_is_raised_and_not_cancelled(tokenizer: ScriptedTokenizer) -> None:
    async def refuse(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise ContextLengthExceeded("Too long.", param="prompt")

    await tokenizer.bus.serve(tokenizer.bus.subjects.generate("small"), GenerateRequest, refuse)
    with pytest.raises(ContextLengthExceeded):
        async with generate(tokenizer.bus, GenerateRequest(model="small", prompt="x")):
            pytest.fail("was accepted")
    await asyncio.sleep(0.05)
    assert tokenizer.cancels == []


@pytest.mark.parametrize("model", ["unknown", None])
async def test_model_that_nobody_serves(tokenizer: ScriptedTokenizer, model: str | None) -> None:
    with pytest.raises(NoResponders):
        async with generate(tokenizer.bus, GenerateRequest(model=model, prompt="x"), accept_timeout_s=0.05):
            pytest.fail("was accepted")
    await asyncio.sleep(0.05)
    assert tokenizer.cancels == []


async def test_tokenizer_that_comes_up_late_is_asked_again(
    tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "ACCEPT_PAUSE_S", 0.02)

    async def come_up() -> None:
        await asyncio.sleep(0.05)
        await tokenizer.bus.serve(tokenizer.bus.subjects.generate("late"), GenerateRequest, tokenizer.accept)

    starting = asyncio.create_task(come_up())
    async with generate(tokenizer.bus, REQUEST.model_copy(update={"model": "late"})) as stream:
        await tokenizer.write("a", final=True)
        assert await texts_of(stream) == ["a"]
    await starting


async def test_tokenizer_that_died_with_the_question_is_replaced_or_its_work_cancelled(
    tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(generation, "ACCEPT_PAUSE_S", 0.02)
    monkeypatch.setattr(generation, "ACCEPT_ATTEMPT_S", 0.03)
    bus, subject = tokenizer.bus, tokenizer.bus.subjects.generate("dies")
    request = REQUEST.model_copy(update={"model": "dies"})
    dying = await bus.transport.subscribe(subject, lambda raw: None)

    async def replace() -> None:
        await asyncio.sleep(0.02)
        await dying.close()

    ending = asyncio.create_task(replace())
    with pytest.raises(NoAnswer):
        async with generate(bus, request, accept_timeout_s=0.15):
            pytest.fail("was accepted")
    await eventually(lambda: tokenizer.cancels)  # it may have stored the request before it died
    await ending
    await bus.serve(subject, GenerateRequest, tokenizer.accept)
    async with generate(bus, request) as stream:
        await tokenizer.write("a", final=True)
        assert await texts_of(stream) == ["a"]


async def test_request_without_an_answer_is_cancelled_for_it_may_run(
    tokenizer: ScriptedTokenizer, eventually: Eventually
) -> None:
    async def sleep(incoming: Incoming[GenerateRequest]) -> Accepted:
        await asyncio.sleep(0.2)
        return await tokenizer.accept(incoming)

    await tokenizer.bus.serve(tokenizer.bus.subjects.generate("slow"), GenerateRequest, sleep)
    request = REQUEST.model_copy(update={"model": "slow"})
    with pytest.raises(NoAnswer):
        async with generate(tokenizer.bus, request, accept_timeout_s=0.02):
            pytest.fail("was accepted")
    await eventually(lambda: tokenizer.cancels == ["req-1"] * len(tokenizer.cancels) and tokenizer.cancels)
    await tokenizer.write("x", final=True)


async def test_many_requests_at_once_keep_apart(tokenizer: ScriptedTokenizer) -> None:
    bus = tokenizer.bus

    async def one(number: int) -> Sequence[str]:
        request = GenerateRequest(model="smol", prompt="x", request_id=f"r{number}")
        async with generate(bus, request) as stream:
            for text in ("a", "b"):
                await bus.append(bus.subjects.out(f"r{number}"), chunk(f"{text}{number}", final=text == "b"))
            return await texts_of(stream)

    assert await asyncio.gather(*map(one, range(20))) == [[f"a{n}", f"b{n}"] for n in range(20)]
