"""Appending to the output log: lost answers, zombies, expiry, outages."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from schemas.codec import SCHEMA_HEADER
from schemas.errors import Unavailable
from schemas.generation import OutputSpec
from schemas.output import NewTokens, OutputChunk
from schemas.subjects import Subjects
from services.runtime.bus import Bus
from services.runtime.memory_transport import MemoryServer, MemoryTransport
from services.runtime.settings import BusSettings
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing
from services.runtime.transport import Appended, StoredMessage
from services.tokenizer import log_writer
from services.tokenizer.log_writer import Fenced, LogWriter
from services.tokenizer.request_output import RequestOutput
from services.tokenizer.vocabulary import byte_vocabulary

BYTES = byte_vocabulary()


class UnreliableTransport(MemoryTransport):
    """A connection that loses answers: an append is stored, but its writer hears nothing; reads fail at will."""

    num_answers_lost = 0
    num_appends_lost = 0
    num_reads_lost = 0

    async def append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> Appended:
        if self.num_appends_lost:
            self.num_appends_lost -= 1
            raise Unavailable("The append was lost.")
        appended = await super().append(subject, body, headers)
        if self.num_answers_lost:
            self.num_answers_lost -= 1
            raise Unavailable("The answer was lost.")
        return appended

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        self._fail_read()
        return await super().last(stream, subject)

    async def read(self, stream: str, subject: str, after: int) -> list[StoredMessage]:
        self._fail_read()
        return await super().read(stream, subject, after)

    def _fail_read(self) -> None:
        if self.num_reads_lost:
            self.num_reads_lost -= 1
            raise Unavailable("The read was lost.")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "RETRY_S", 0.001)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> MemoryServer:
    return MemoryServer(clock=clock)


@pytest.fixture
async def transport(server: MemoryServer) -> UnreliableTransport:
    transport = UnreliableTransport(server)
    await ensure_streams(transport, Subjects(), BusSettings())
    return transport


@pytest.fixture
def bus(transport: UnreliableTransport, tracing: Tracing) -> Bus:
    return Bus(transport, Subjects(), tracing)


@pytest.fixture
def writer_of(bus: Bus) -> Callable[..., tuple[LogWriter, RequestOutput]]:
    def make(epoch: int = 1) -> tuple[LogWriter, RequestOutput]:
        spec = OutputSpec(request_id="r", model="smol", created_s=0.1, num_prompt_tokens=1, num_logprobs=1)
        output = RequestOutput(spec, epoch, BYTES)
        return LogWriter(bus, output), output

    return make


def chunk_of(output: RequestOutput, text: str, **fields: Any) -> OutputChunk:
    start = output.num_tokens(0)
    output.feed(NewTokens(request_id="r", epoch=output.epoch, start=start, token_ids=tuple(text.encode()), **fields))
    chunk = output.take_chunk()
    assert chunk is not None
    return chunk


async def log_of(bus: Bus) -> list[OutputChunk]:
    return [entry.message for entry in await bus.read(bus.subjects.out_stream, bus.subjects.out("r"), OutputChunk)]


async def text_of(bus: Bus) -> str:
    return "".join(delta.text for chunk in await log_of(bus) for delta in chunk.choices)


async def test_chunks_are_appended_in_order(bus: Bus, writer_of: Any) -> None:
    writer, output = writer_of()
    chunks = [chunk_of(output, text) for text in ("He", "llo")]
    for chunk in chunks:
        assert await writer.append(chunk) == chunk
    assert await log_of(bus) == chunks


async def test_lost_answer_is_looked_up_and_the_chunk_is_there_once(
    bus: Bus, transport: UnreliableTransport, writer_of: Any
) -> None:
    writer, output = writer_of()
    for text in ("a", "b", "c"):
        transport.num_answers_lost, transport.num_reads_lost = 1, 2
        await writer.append(chunk_of(output, text))
    assert await text_of(bus) == "abc"


async def test_outage_delays_but_loses_nothing(bus: Bus, transport: UnreliableTransport, writer_of: Any) -> None:
    writer, output = writer_of()
    transport.num_appends_lost = 5
    await writer.append(chunk_of(output, "a"))
    assert await text_of(bus) == "a"


async def test_takeover_continues_and_the_old_writer_cannot_append(bus: Bus, writer_of: Any) -> None:
    (old, old_output), (new, new_output) = writer_of(1), writer_of(2)
    await old.append(chunk_of(old_output, "He"))
    newest = await new.take_over()
    assert newest is not None
    assert newest.choices[0].text == "He"
    with pytest.raises(Fenced):
        await old.append(chunk_of(old_output, "XX"))
    await new.append(chunk_of(new_output, "llo", finish_reason="length"))
    assert await text_of(bus) == "Hello"
    assert [chunk.epoch for chunk in await log_of(bus)] == [1, 2, 2]


async def test_lower_epoch_cannot_take_over(writer_of: Any) -> None:
    (new, _), (old, _) = writer_of(5), writer_of(4)
    await new.take_over()
    with pytest.raises(Fenced):
        await old.take_over()


async def test_takeover_of_an_empty_log_fences_too(bus: Bus, writer_of: Any) -> None:
    (old, old_output), (new, new_output) = writer_of(1), writer_of(2)
    assert await new.take_over() is None
    with pytest.raises(Fenced):
        await old.append(chunk_of(old_output, "zombie"))
    await new.append(chunk_of(new_output, "a"))
    assert await text_of(bus) == "a"


async def test_takeover_of_a_complete_log_writes_nothing(bus: Bus, writer_of: Any) -> None:
    (old, old_output), (new, new_output) = writer_of(1), writer_of(2)
    await old.append(chunk_of(old_output, "done", finish_reason="stop"))
    newest = await new.take_over()
    assert newest is not None
    assert newest.final
    assert new_output.is_final
    assert len(await log_of(bus)) == 1


async def test_takeover_survives_lost_reads_and_lost_answers(
    bus: Bus, transport: UnreliableTransport, writer_of: Any
) -> None:
    (old, old_output), (new, new_output) = writer_of(1), writer_of(2)
    await old.append(chunk_of(old_output, "a"))
    transport.num_reads_lost, transport.num_answers_lost = 3, 1
    await new.take_over()
    await new.append(chunk_of(new_output, "b"))
    assert await text_of(bus) == "ab"


async def test_old_writer_that_is_faster_during_the_takeover_is_read_again(
    bus: Bus, transport: UnreliableTransport, writer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, old_output), (new, new_output) = writer_of(1), writer_of(2)
    await old.append(chunk_of(old_output, "a"))
    read, late = transport.read, [chunk_of(old_output, "b")]

    async def read_and_then_the_old_one_writes(*arguments: Any) -> list[StoredMessage]:
        stored = await read(*arguments)
        if late:
            await old.append(late.pop())
        return stored

    monkeypatch.setattr(transport, "read", read_and_then_the_old_one_writes)
    await new.take_over()
    assert new_output.num_tokens(0) == 2
    await new.append(chunk_of(new_output, "c"))
    assert await text_of(bus) == "abc"


async def test_log_that_expired_is_begun_again(bus: Bus, clock: Clock, writer_of: Any) -> None:
    writer, output = writer_of()
    await writer.append(chunk_of(output, "a"))
    clock.now_s += 4000
    await writer.append(chunk_of(output, "b"))
    await writer.append(chunk_of(output, "c"))
    assert await text_of(bus) == "bc"


async def test_chunk_that_no_message_can_hold_ends_the_request(bus: Bus, server: MemoryServer, writer_of: Any) -> None:
    writer, output = writer_of()
    await writer.append(chunk_of(output, "a"))
    server.max_payload = 600
    async with asyncio.timeout(2):
        stored = await writer.append(chunk_of(output, "b" * 900))
    assert stored.final
    assert stored.error is not None
    assert stored.error.code == "payload_too_large"
    assert output.is_final
    assert (await log_of(bus))[-1] == stored


@pytest.mark.parametrize("body", [b"{", b"{}"])
async def test_log_that_cannot_be_read_ends_with_an_error(bus: Bus, writer_of: Any, body: bytes) -> None:
    """Damage, or a chunk of a newer version, stands in the log: this writer must not guess, and nothing may hang."""
    await bus.transport.append(bus.subjects.out("r"), body, {SCHEMA_HEADER: "output_chunk/2"})
    writer, output = writer_of(2)
    final = await writer.take_over()
    assert (final.final, final.error.code) == (True, "internal_error")
    assert output.take_chunk() is None
    newest = await bus.last(bus.subjects.out_stream, bus.subjects.out("r"), OutputChunk)
    assert newest is not None
    assert newest.message == final


async def test_writer_that_finds_something_unreadable_behind_its_own_is_fenced(bus: Bus, writer_of: Any) -> None:
    writer, output = writer_of(1)
    await bus.transport.append(bus.subjects.out("r"), b"{", {})
    with pytest.raises(Fenced):
        await writer.append(output.chunk())


async def test_writer_knows_when_another_one_has_taken_over(bus: Bus, writer_of: Any) -> None:
    writer, output = writer_of(1)
    await writer.append(output.chunk())
    assert not await writer.is_replaced()
    await writer_of(2)[0].take_over()
    assert await writer.is_replaced()
