"""All outputs of one tokenizer: token batches in, the log and feedback out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.codec import decode
from schemas.errors import Cancelled
from schemas.generation import OutputSpec
from schemas.output import Feedback, NewTokens, OpenOutput, OutputChunk, OutputFeedback, RequestFailed, TokenBatch
from services.runtime.bus import Bus
from services.runtime.telemetry import Tracing
from services.runtime.transport import RawMessage
from services.tokenizer import outputs as outputs_module
from services.tokenizer.outputs import Outputs
from services.tokenizer.vocabulary import byte_vocabulary

Eventually = Callable[..., Awaitable[None]]
BYTES = byte_vocabulary()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def opened(epoch: int = 1, request_id: str = "r", *, resume: bool = False, **fields: Any) -> OpenOutput:
    spec = OutputSpec(**{"model": "smol", "created_s": 1.0, "num_prompt_tokens": 2, **fields, "request_id": request_id})
    return OpenOutput(spec=spec, epoch=epoch, resume=resume)


def tokens(text: str, start: int = 0, epoch: int = 1, request_id: str = "r", **fields: Any) -> NewTokens:
    token_ids = tuple(text.encode())
    return NewTokens(request_id=request_id, epoch=epoch, start=start, token_ids=token_ids, **fields)


def failed(epoch: int = 1) -> RequestFailed:
    return RequestFailed(request_id="r", epoch=epoch, error=Cancelled("cancelled by the client").body())


@dataclass
class Tokenizer:
    """Outputs under test, and everything that they say."""

    bus: Bus
    outputs: Outputs
    feedback: list[Feedback] = field(default_factory=list)
    replies: list[OutputChunk] = field(default_factory=list)

    def apply(self, *news: OpenOutput | NewTokens | RequestFailed, scheduler: str = "scheduler-0") -> None:
        self.outputs.apply(
            TokenBatch(
                scheduler=scheduler,
                opened=tuple(item for item in news if isinstance(item, OpenOutput)),
                tokens=tuple(item for item in news if isinstance(item, NewTokens)),
                failed=tuple(item for item in news if isinstance(item, RequestFailed)),
            )
        )

    async def settle(self) -> None:
        await self.outputs.settle(5)
        await asyncio.sleep(0.01)

    async def log(self, request_id: str = "r") -> list[OutputChunk]:
        subjects = self.bus.subjects
        stored = await self.bus.read(subjects.out_stream, subjects.out(request_id), OutputChunk)
        return [entry.message for entry in stored]

    async def text(self, request_id: str = "r") -> str:
        return "".join(delta.text for chunk in await self.log(request_id) for delta in chunk.choices)

    @property
    def events(self) -> list[str]:
        return [item.event for item in self.feedback]


async def listening(bus: Bus, tracing: Tracing) -> Tokenizer:
    tokenizer = Tokenizer(bus, Outputs(bus, tracing, "tokenizer-0", BYTES))

    def hear(raw: RawMessage) -> None:
        tokenizer.feedback += decode(OutputFeedback, raw.headers, raw.body).items

    def take_reply(raw: RawMessage) -> None:
        tokenizer.replies.append(decode(OutputChunk, raw.headers, raw.body))

    await bus.transport.subscribe(bus.subjects.feedback("scheduler-0"), hear)
    await bus.transport.subscribe("client.inbox", take_reply)
    await bus.transport.flush()
    return tokenizer


@pytest.fixture
async def tokenizer(memory_bus: Bus, tracing: Tracing) -> AsyncIterator[Tokenizer]:
    tokenizer = await listening(memory_bus, tracing)
    yield tokenizer
    tokenizer.outputs.close()


async def test_tokens_become_text_in_the_log_and_the_end_is_fed_back(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("He"))
    await tokenizer.settle()
    tokenizer.apply(tokens("llo", 2, finish_reason="length"))
    await tokenizer.settle()
    log = await tokenizer.log()
    assert await tokenizer.text() == "Hello"
    assert [chunk.final for chunk in log] == [False, True]
    assert [(item.event, item.epoch, item.request_id) for item in tokenizer.feedback] == [("stored", 1, "r")]
    assert len(tokenizer.outputs) == 0


async def test_what_comes_while_a_chunk_is_stored_is_one_chunk(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("a"))
    for start, text in enumerate("bcdef", start=1):
        tokenizer.apply(tokens(text, start))
    await tokenizer.settle()
    assert await tokenizer.text() == "abcdef"
    assert len(await tokenizer.log()) <= 2


@pytest.fixture
async def patient(memory_bus: Bus, tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tokenizer]:
    """A tokenizer with many outputs, of which each would wait for hours."""
    tokenizer = await listening(memory_bus, tracing)
    tokenizer.outputs = Outputs(memory_bus, tracing, "tokenizer-0", BYTES, max_wait_s=1e4)
    for number in range(outputs_module.FEW_OUTPUTS):
        tokenizer.apply(opened(request_id=f"other-{number}"))
    monkeypatch.setattr(outputs_module, "APPENDS_PER_S", 1e-3)
    yield tokenizer
    tokenizer.outputs.close()


async def test_of_many_outputs_each_waits_for_more_but_not_with_its_beginning_and_end(
    patient: Tokenizer,
) -> None:
    async def num_chunks() -> int:
        return len(await patient.log())

    patient.apply(opened(), tokens("a"))
    await wait_for(num_chunks, 1)
    patient.apply(tokens("b", 1))
    patient.apply(tokens("c", 2))
    await asyncio.sleep(0.05)
    assert await num_chunks() == 1
    patient.apply(tokens("d", 3, finish_reason="length"))
    await wait_for(num_chunks, 2)
    assert await patient.text() == "abcd"


async def test_what_waits_is_stored_before_the_tokenizer_leaves(patient: Tokenizer) -> None:
    patient.apply(opened(), tokens("a"))
    await asyncio.sleep(0.02)
    patient.apply(tokens("b", 1))
    await patient.settle()
    assert await patient.text() == "ab"


async def wait_for(count: Callable[[], Awaitable[int]], wanted: int) -> None:
    async with asyncio.timeout(5):
        while await count() != wanted:  # noqa: ASYNC110 (the log has no event)
            await asyncio.sleep(0.005)


async def test_unknown_request_is_fed_back_as_lost(tokenizer: Tokenizer) -> None:
    tokenizer.apply(tokens("x", 5, epoch=3), failed())
    await tokenizer.settle()
    assert [(item.event, item.epoch) for item in tokenizer.feedback] == [("lost", 3), ("lost", 1)]


async def test_missing_tokens_are_fed_back_as_lost_and_come_again_in_the_next_epoch(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("a"))
    tokenizer.apply(tokens("c", 2))
    await tokenizer.settle()
    assert tokenizer.events == ["lost"]
    tokenizer.apply(opened(2, resume=True), tokens("abc", 0, epoch=2))
    tokenizer.apply(tokens("d", 3, epoch=2, finish_reason="length"))
    await tokenizer.settle()
    assert await tokenizer.text() == "abcd"
    assert tokenizer.events == ["lost", "stored"]


async def test_stop_string_is_fed_back_with_the_completing_token(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(stop=("three",), n=2), tokens("one, two, three, four"))
    tokenizer.apply(tokens("five", 21))
    await tokenizer.settle()
    assert {(item.event, item.index, item.num_tokens) for item in tokenizer.feedback} == {("stopped", 0, 15)}
    assert len(tokenizer.feedback) == 2  # told again, for the first might have been lost
    tokenizer.apply(tokens("x", index=1, finish_reason="length"))
    await tokenizer.settle()
    assert await tokenizer.text() == "one, two, x"
    assert tokenizer.events[-1] == "stored"


async def test_failure_becomes_the_final_chunk(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("He"), failed())
    await tokenizer.settle()
    [chunk] = await tokenizer.log()
    assert (chunk.choices[0].text, chunk.final) == ("He", True)
    assert chunk.error is not None
    assert chunk.error.code == "cancelled"
    assert tokenizer.events == ["stored"]


async def test_failure_before_any_token_is_stored_too(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), failed())
    await tokenizer.settle()
    assert [(chunk.choices, chunk.final) for chunk in await tokenizer.log()] == [((), True)]


async def test_failure_after_the_end_changes_nothing(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("a", finish_reason="length"), failed())
    await tokenizer.settle()
    [chunk] = await tokenizer.log()
    assert chunk.error is None


async def test_opening_twice_in_one_epoch_is_harmless(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("He"))
    tokenizer.apply(opened(), tokens("Hello", finish_reason="length"))
    await tokenizer.settle()
    assert await tokenizer.text() == "Hello"


async def test_scheduler_of_a_lower_epoch_is_fenced(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(5), tokens("He", epoch=5))
    tokenizer.apply(opened(4), tokens("XX", epoch=4), failed(4))
    await tokenizer.settle()
    assert [(item.event, item.epoch) for item in tokenizer.feedback] == [("fenced", 4)] * 2
    assert await tokenizer.text() == "He"


async def test_reopening_in_quick_succession_keeps_one_writer(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(1), tokens("He"))
    for epoch in (2, 3, 4):
        tokenizer.apply(opened(epoch, resume=True), tokens("Hello", epoch=epoch))
        await asyncio.sleep(0)
    tokenizer.apply(tokens("!", 5, epoch=4, finish_reason="length"))
    await tokenizer.settle()
    assert await tokenizer.text() == "Hello!"
    assert [chunk.final for chunk in await tokenizer.log()].count(True) == 1
    assert (tokenizer.events, len(tokenizer.outputs)) == (["stored"], 0)


async def test_news_during_the_takeover_waits_for_it(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(2, resume=True))
    tokenizer.apply(tokens("a", 0, epoch=2))
    tokenizer.apply(tokens("b", 1, epoch=2), failed(2))
    await tokenizer.settle()
    assert await tokenizer.text() == "ab"
    assert tokenizer.events == ["stored"]


async def test_two_tokenizers_the_first_is_fenced_and_the_text_is_whole(
    tokenizer: Tokenizer, memory_bus: Bus, tracing: Tracing
) -> None:
    other = Tokenizer(memory_bus, Outputs(memory_bus, tracing, "tokenizer-1", BYTES))
    tokenizer.apply(opened(), tokens("He"))
    await tokenizer.settle()
    other.apply(opened(2, resume=True), tokens("Hell", epoch=2))
    await other.outputs.settle(5)
    tokenizer.apply(tokens("XX", 2))
    await tokenizer.settle()
    assert tokenizer.events == ["fenced"]
    assert len(tokenizer.outputs) == 0
    other.apply(tokens("o", 4, epoch=2, finish_reason="length"))
    await other.outputs.settle(5)
    assert await other.text() == "Hello"
    tokenizer.apply(opened(1, resume=True), tokens("zombie"))
    await tokenizer.settle()
    assert tokenizer.events == ["fenced", "stored", "fenced"]


async def test_resuming_a_complete_output_says_so_and_sends_the_end_again(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), tokens("a", finish_reason="length"))
    await tokenizer.settle()
    tokenizer.apply(opened(2, resume=True, reply="client.inbox"), tokens("a", epoch=2, finish_reason="length"))
    await tokenizer.settle()
    assert tokenizer.events == ["stored", "stored"]
    assert [chunk.final for chunk in tokenizer.replies] == [True]
    assert len(await tokenizer.log()) == 1


async def test_chunks_go_to_the_reply_subject_too(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(reply="client.inbox"), tokens("He"))
    await tokenizer.settle()
    tokenizer.apply(tokens("y", 2, finish_reason="length"))
    await tokenizer.settle()
    assert tokenizer.replies == await tokenizer.log()


async def test_unsound_tokens_of_one_request_do_not_touch_another(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(), opened(request_id="s"))
    tokenizer.apply(tokens("x", index=7), tokens("ok", request_id="s", finish_reason="length"))
    await tokenizer.settle()
    assert (await tokenizer.text(), await tokenizer.text("s")) == ("", "ok")


async def test_every_output_has_a_span_in_its_requests_trace(
    tokenizer: Tokenizer, span_exporter: InMemorySpanExporter
) -> None:
    tokenizer.apply(opened(traceparent=TRACEPARENT), tokens("He"))
    tokenizer.apply(opened(2, resume=True, traceparent=TRACEPARENT), tokens("Hey", epoch=2, finish_reason="length"))
    await tokenizer.settle()
    spans = [span for span in span_exporter.get_finished_spans() if span.name == "tokenizer.detokenize"]
    assert len(spans) == 2
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACEPARENT.split("-")[1]}
    assert spans[-1].attributes is not None
    assert spans[-1].attributes["gen_ai.usage.output_tokens"] == 3
    assert [[event.name for event in span.events] for span in spans] == [[], ["natterjack.output_taken_over"]]


async def test_closed_bus_loses_replies_and_feedback_but_raises_nothing(tokenizer: Tokenizer) -> None:
    tokenizer.apply(opened(reply="client.inbox"), tokens("He"))
    await tokenizer.settle()
    await tokenizer.bus.close()
    tokenizer.apply(tokens("x", 9, epoch=2))
    tokenizer.apply(tokens("y", 2, finish_reason="length"))
    await tokenizer.outputs.settle(0.1)
    tokenizer.outputs.close()


async def test_reply_that_cannot_be_sent_does_not_hinder_the_log(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = tokenizer.bus.publish

    async def refuse_replies(subject: str, *arguments: Any, **options: Any) -> None:
        if subject == "client.inbox":
            raise Cancelled("no way")
        await publish(subject, *arguments, **options)

    monkeypatch.setattr(tokenizer.bus, "publish", refuse_replies)
    tokenizer.apply(opened(reply="client.inbox"), tokens("He", finish_reason="length"))
    await tokenizer.settle()
    assert await tokenizer.text() == "He"
    assert tokenizer.events == ["stored"]


async def test_output_that_another_writer_has_taken_over_is_forgotten_when_it_has_been_idle(
    tokenizer: Tokenizer, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that was paused: nobody sends it anything any more."""
    monkeypatch.setattr(outputs_module, "IDLE_S", 0.02)
    other = Outputs(tokenizer.bus, tracing, "tokenizer-1", BYTES)
    tokenizer.apply(opened(), tokens("He"))
    await tokenizer.settle()
    await asyncio.sleep(0.03)
    await tokenizer.outputs.sweep()
    assert len(tokenizer.outputs) == 1
    other.apply(TokenBatch(scheduler="scheduler-0", opened=(opened(2, resume=True),)))
    await other.settle(5)
    await asyncio.sleep(0.03)
    await tokenizer.outputs.sweep()
    assert len(tokenizer.outputs) == 0
    other.close()


@pytest.mark.parametrize("text", ["", "xyz"])
async def test_log_that_cannot_be_read_ends_with_an_error_that_is_fed_back(tokenizer: Tokenizer, text: str) -> None:
    await tokenizer.bus.transport.append(tokenizer.bus.subjects.out("r"), b"{", {})
    tokenizer.apply(opened(2, resume=True), *([tokens(text, 5, 2)] if text else []))
    await tokenizer.settle()
    assert [item.event for item in tokenizer.feedback] == ["stored"]
    assert len(tokenizer.outputs) == 0


async def test_client_on_a_reply_subject_gets_what_a_dead_writer_stored_last(
    tokenizer: Tokenizer, tracing: Tracing
) -> None:
    """It may have died before it replied; all chunks before its last one were sent before that was stored."""
    tokenizer.apply(opened(), tokens("Hell"))  # without the reply: it died just then
    await tokenizer.settle()
    heir = await listening(tokenizer.bus, tracing)
    heir.apply(opened(2, resume=True, reply="client.inbox"), tokens("Hello", epoch=2, finish_reason="length"))
    await heir.settle()
    heir.outputs.close()
    assert [(d.start, d.text) for chunk in heir.replies for d in chunk.choices] == [(0, "Hell"), (4, "o")]


async def test_writer_that_slept_between_storing_and_replying_says_nothing_late(
    tokenizer: Tokenizer, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, slept = tokenizer.bus.append, asyncio.Event()

    async def append_and_sleep(*arguments: Any, **options: Any) -> Any:
        stored = await append(*arguments, **options)
        await slept.wait()
        return stored

    monkeypatch.setattr(outputs_module, "DOUBTFUL_S", 0.0)
    monkeypatch.setattr(tokenizer.bus, "append", append_and_sleep)
    tokenizer.apply(opened(reply="client.inbox"), tokens("Hell"))
    await asyncio.sleep(0.05)
    monkeypatch.undo()
    heir = await listening(tokenizer.bus, tracing)
    heir.apply(opened(2, resume=True, reply="client.inbox"), tokens("Hello", epoch=2, finish_reason="length"))
    await heir.settle()
    before = len(heir.replies)
    monkeypatch.setattr(outputs_module, "DOUBTFUL_S", 0.0)
    slept.set()
    await tokenizer.settle()
    heir.outputs.close()
    assert len(heir.replies) == before
    assert "fenced" in tokenizer.events
