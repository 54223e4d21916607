"""One behaviour of streams, over NATS and in memory: the output log, the work queue, the limits."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.control import Cancel
from schemas.errors import Conflict, MalformedMessage, QueueFull, Unavailable
from services.runtime.bus import Bus, Delivery
from services.runtime.streams import ensure_work_consumers, work_consumer
from services.runtime.transport import (
    PREVIOUS_SEQUENCE_HEADER,
    SEQUENCE_HEADER,
    Appended,
    ConsumerSpec,
    RawMessage,
    StreamSpec,
)

Eventually = Callable[..., Awaitable[None]]
Connect = Callable[..., Awaitable[Bus]]
ACK_WAIT_S = 0.3


def item(name: int | str) -> Cancel:
    return Cancel(request_id=str(name))


async def log_of(bus: Bus, request: str, *, after: int = 0) -> list[str]:
    stored = await bus.read(bus.subjects.out_stream, bus.subjects.out(request), Cancel, after=after)
    return [entry.message.request_id for entry in stored]


async def size(bus: Bus, stream: str) -> int:
    return await bus.transport.num_messages(stream)


# ---- the output log


async def test_append_stores_in_order_and_returns_the_sequence(bus: Bus) -> None:
    subject = bus.subjects.out("r")
    sequences = [(await bus.append(subject, item(number))).sequence for number in range(3)]
    assert sequences == [1, 2, 3]
    assert await log_of(bus, "r") == ["0", "1", "2"]
    assert await log_of(bus, "r", after=2) == ["2"]
    assert await log_of(bus, "r", after=3) == []
    assert await log_of(bus, "other") == []


async def test_append_with_the_expected_last_sequence_admits_one_of_two_writers(bus: Bus) -> None:
    subject = bus.subjects.out("r")
    await bus.append(bus.subjects.out("other"), item("other"))
    first = await bus.append(subject, item("a"), expected_last=0)
    second = await bus.append(subject, item("b"), expected_last=first.sequence)
    for stale in (0, first.sequence, second.sequence + 1):
        with pytest.raises(Conflict):
            await bus.append(subject, item("late"), expected_last=stale)
    assert await log_of(bus, "r") == ["a", "b"]


async def test_of_concurrent_writers_exactly_one_wins(bus: Bus, connect_bus: Connect) -> None:
    writers = [bus, await connect_bus(), await connect_bus()]
    subject = bus.subjects.out("r")
    results = await asyncio.gather(
        *(writer.append(subject, item(number), expected_last=0) for number, writer in enumerate(writers)),
        return_exceptions=True,
    )
    assert [type(result) for result in results if not isinstance(result, Appended)] == [Conflict, Conflict]
    assert len(await log_of(bus, "r")) == 1


async def test_message_id_is_stored_once(bus: Bus) -> None:
    subject = bus.subjects.out("r")
    first = await bus.append(subject, item("a"), message_id="m1")
    again = await bus.append(subject, item("a"), message_id="m1")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.sequence == first.sequence
    assert await log_of(bus, "r") == ["a"]


async def test_last_and_last_of_each(bus: Bus) -> None:
    subjects, stream = bus.subjects, bus.subjects.out_stream
    assert await bus.last(stream, subjects.out("a"), Cancel) is None
    assert await bus.transport.last_of_each(stream, subjects.out_all) == []
    for request, name in (("a", "a1"), ("b", "b1"), ("a", "a2")):
        await bus.append(subjects.out(request), item(name))
    last = await bus.last(stream, subjects.out("a"), Cancel)
    assert last is not None
    assert (last.message.request_id, last.sequence, last.subject) == ("a2", 3, subjects.out("a"))
    found = await bus.transport.last_of_each(stream, subjects.out_all)
    assert {message.subject: message.sequence for message in found} == {subjects.out("a"): 3, subjects.out("b"): 2}


async def test_a_message_is_found_by_its_number_while_it_is_kept(bus: Bus) -> None:
    stream = bus.subjects.out_stream
    for name in ("a", "b"):
        await bus.append(bus.subjects.out("r"), item(name))
    found = await bus.at(stream, 1, Cancel)
    assert found is not None
    assert (found.message.request_id, found.sequence) == ("a", 1)
    assert await bus.at(stream, 3, Cancel) is None


async def test_long_logs_are_read_in_pages(bus: Bus) -> None:
    await asyncio.gather(*(bus.append(bus.subjects.out("r"), item(number)) for number in range(520)))
    await bus.append(bus.subjects.out("other"), item("other"))
    assert sorted(await log_of(bus, "r"), key=int) == [str(number) for number in range(520)]


async def test_stored_messages_are_republished_with_their_place_in_the_log(bus: Bus, eventually: Eventually) -> None:
    seen: list[RawMessage] = []
    await bus.transport.subscribe(bus.subjects.live("r"), seen.append)
    await bus.transport.flush()
    for request in ("r", "other", "r", "r"):
        await bus.append(bus.subjects.out(request), item(request))
    await eventually(lambda: len(seen) == 3)
    places = [(int(raw.headers[SEQUENCE_HEADER]), int(raw.headers[PREVIOUS_SEQUENCE_HEADER])) for raw in seen]
    assert places == [(1, 0), (3, 1), (4, 3)]
    assert {raw.subject for raw in seen} == {bus.subjects.live("r")}
    assert all(raw.headers["Nj-Schema"] == "cancel/1" for raw in seen)


async def test_refused_appends_are_not_republished(bus: Bus) -> None:
    seen: list[RawMessage] = []
    await bus.transport.subscribe(bus.subjects.live("r"), seen.append)
    await bus.append(bus.subjects.out("r"), item("a"), message_id="m")
    await bus.append(bus.subjects.out("r"), item("a"), message_id="m")
    with pytest.raises(Conflict):
        await bus.append(bus.subjects.out("r"), item("b"), expected_last=0)
    await asyncio.sleep(0.03)
    assert len(seen) == 1


async def test_unreadable_entry_of_a_log_is_a_coded_error(bus: Bus) -> None:
    await bus.transport.append(bus.subjects.out("r"), b"{", {})
    with pytest.raises(MalformedMessage):
        await log_of(bus, "r")


async def test_subject_or_stream_that_does_not_exist_is_unavailable(bus: Bus) -> None:
    prefix = bus.subjects.prefix
    with pytest.raises(Unavailable):
        await bus.append(f"{prefix}.v1.nowhere", item("x"))
    for attempt in (bus.transport.num_messages, lambda name: bus.read(name, f"{prefix}.v1.out.x", Cancel)):
        with pytest.raises(Unavailable):
            await attempt(f"{prefix.upper()}_NOTHING")  # type: ignore[operator]
    with pytest.raises(Unavailable):
        await bus.fetch(bus.subjects.work_stream, "nobody", Cancel, batch=1, timeout_s=0.2)


# ---- limits


async def test_usage_tells_what_is_stored_and_what_may_be(bus: Bus) -> None:
    subject = await _stream(bus, max_msgs=10, max_bytes=1 << 20)
    stream = f"{bus.subjects.prefix.upper()}_TEST"
    empty = await bus.transport.usage(stream)
    assert (empty.num_messages, empty.num_bytes, empty.max_messages, empty.max_bytes) == (0, 0, 10, 1 << 20)
    await bus.append(subject, item("x" * 100))
    used = await bus.transport.usage(stream)
    assert used.num_messages == 1
    assert 100 < used.num_bytes < 1000
    with pytest.raises(Unavailable):
        await bus.transport.usage(f"{bus.subjects.prefix.upper()}_NOTHING")


async def _stream(bus: Bus, *, work_queue: bool = False, **limits: float) -> str:
    """Create a stream of the test's own and return its one subject."""
    name = f"{bus.subjects.prefix.upper()}_TEST"
    subject = f"{bus.subjects.prefix}.v1.test"
    await bus.transport.ensure_stream(StreamSpec(name, [subject], work_queue=work_queue, **limits))  # type: ignore[arg-type]
    return subject


@pytest.mark.parametrize("limits", [{"max_msgs": 3}, {"max_bytes": 500}], ids=["messages", "bytes"])
async def test_full_work_queue_refuses_and_a_log_forgets_its_oldest(bus: Bus, limits: dict[str, int]) -> None:
    name = f"{bus.subjects.prefix.upper()}_TEST"
    subject = await _stream(bus, work_queue=True, **limits)

    async def fill() -> None:
        for number in range(10):
            await bus.append(subject, item("x" * 100 + str(number)))

    with pytest.raises(QueueFull):
        await fill()
    assert 1 <= await size(bus, name) <= 4


async def test_log_at_its_limit_forgets_its_oldest(bus: Bus) -> None:
    subject = await _stream(bus, max_msgs=3)
    for number in range(5):
        await bus.append(subject, item(number))
    stored = await bus.read(f"{bus.subjects.prefix.upper()}_TEST", subject, Cancel)
    assert [entry.message.request_id for entry in stored] == ["2", "3", "4"]


async def test_messages_per_subject_are_limited(bus: Bus) -> None:
    subject = await _stream(bus, max_msgs_per_subject=2)
    for number in range(4):
        await bus.append(subject, item(number))
    stored = await bus.read(f"{bus.subjects.prefix.upper()}_TEST", subject, Cancel)
    assert [entry.message.request_id for entry in stored] == ["2", "3"]


async def test_old_messages_expire(bus: Bus) -> None:
    subject = await _stream(bus, max_age_s=0.2)
    await bus.append(subject, item("old"))
    await asyncio.sleep(0.5)
    assert await bus.last(f"{bus.subjects.prefix.upper()}_TEST", subject, Cancel) is None


async def test_ensuring_a_stream_again_keeps_its_messages_and_takes_new_limits(bus: Bus) -> None:
    name = f"{bus.subjects.prefix.upper()}_TEST"
    subject = await _stream(bus, max_msgs=10)
    await bus.append(subject, item("kept"))
    await _stream(bus, max_msgs=10)
    await _stream(bus, max_msgs=2)
    for number in range(2):
        await bus.append(subject, item(number))
    assert [entry.message.request_id for entry in await bus.read(name, subject, Cancel)] == ["0", "1"]


# ---- the work queue


async def _queue(bus: Bus, *, ack_wait_s: float = 30.0) -> Callable[..., Awaitable[list[Delivery[Cancel]]]]:
    """Make the consumer of the model `smol`; return a fetch of it."""
    consumer = work_consumer(bus.subjects, "smol", "normal", ack_wait_s)
    await bus.transport.ensure_consumer(consumer)

    async def fetch(batch: int = 10, timeout_s: float = 1.0, by: Bus = bus) -> list[Delivery[Cancel]]:
        return await by.fetch(consumer.stream, consumer.name, Cancel, batch=batch, timeout_s=timeout_s)

    return fetch


def names(deliveries: list[Delivery[Cancel]]) -> list[str | None]:
    return [None if delivery.message is None else delivery.message.request_id for delivery in deliveries]


async def test_what_is_urgent_is_taken_past_what_waits(bus: Bus) -> None:
    await ensure_work_consumers(bus.transport, bus.subjects, "smol", 30.0)
    for number in range(5):
        await bus.append(bus.subjects.work("smol", "low"), item(number))
    await bus.append(bus.subjects.work("smol", "high"), item("urgent"))
    stream = bus.subjects.work_stream
    for priority, first in (("high", "urgent"), ("low", "0")):
        [delivery] = await bus.fetch(
            stream, bus.subjects.work_consumer("smol", priority), Cancel, batch=1, timeout_s=1.0
        )
        assert names([delivery]) == [first]


async def test_a_consumer_of_an_earlier_version_makes_way_and_loses_nothing(bus: Bus) -> None:
    stream, former = bus.subjects.work_stream, bus.subjects.former_work_consumer("smol")
    await bus.transport.ensure_consumer(ConsumerSpec(stream, former, bus.subjects.work_of("smol"), 30.0))
    await bus.append(bus.subjects.work("smol", "normal"), item("held"))
    assert names(await bus.fetch(stream, former, Cancel, batch=1, timeout_s=1.0)) == ["held"]
    for _ in range(2):
        await ensure_work_consumers(bus.transport, bus.subjects, "smol", 30.0)
    consumer = bus.subjects.work_consumer("smol", "normal")
    assert names(await bus.fetch(stream, consumer, Cancel, batch=1, timeout_s=1.0)) == ["held"]


async def test_work_is_handed_out_in_order_and_forgotten_once_acknowledged(bus: Bus) -> None:
    fetch = await _queue(bus)
    for number in range(3):
        await bus.append(bus.subjects.work("smol", "normal"), item(number))
    await bus.append(bus.subjects.work("other", "normal"), item("other"))
    deliveries = await fetch()
    assert names(deliveries) == ["0", "1", "2"]
    assert [delivery.num_delivered for delivery in deliveries] == [1, 1, 1]
    for delivery in deliveries:
        await bus.settle(delivery, "ack")
    await bus.transport.flush()
    assert await fetch(timeout_s=0.05) == []
    await asyncio.sleep(0.05)
    assert await size(bus, bus.subjects.work_stream) == 1


async def test_fetch_returns_as_soon_as_there_is_work_and_empty_after_its_timeout(bus: Bus) -> None:
    fetch = await _queue(bus)
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert await fetch(timeout_s=0.2) == []
    assert 0.1 < loop.time() - start < 2
    waiting = asyncio.create_task(fetch(timeout_s=5.0))
    await asyncio.sleep(0.05)
    await bus.append(bus.subjects.work("smol", "normal"), item("x"))
    start = loop.time()
    assert names(await waiting) == ["x"]
    assert loop.time() - start < 1


@pytest.mark.parametrize("batch", [1, 2])
async def test_fetch_takes_no_more_than_the_batch(bus: Bus, batch: int) -> None:
    fetch = await _queue(bus)
    for number in range(4):
        await bus.append(bus.subjects.work("smol", "normal"), item(number))
    assert names(await fetch(batch=batch)) == ["0", "1"][:batch]
    assert len(await fetch(batch=10)) == 4 - batch


async def test_two_workers_share_the_queue_without_overlap(bus: Bus, connect_bus: Connect) -> None:
    fetch, other = await _queue(bus), await connect_bus()
    for number in range(10):
        await bus.append(bus.subjects.work("smol", "normal"), item(number))
    mine, theirs = await fetch(batch=5), await fetch(batch=5, by=other)
    assert sorted(names(mine + theirs), key=str) == [str(number) for number in range(10)]


async def test_unacknowledged_work_is_handed_out_again_after_the_wait(bus: Bus) -> None:
    fetch = await _queue(bus, ack_wait_s=ACK_WAIT_S)
    await bus.append(bus.subjects.work("smol", "normal"), item("x"))
    (first,) = await fetch()
    assert await fetch(timeout_s=ACK_WAIT_S / 3) == []
    (again,) = await fetch(timeout_s=3)
    assert (names([again]), again.num_delivered) == (["x"], 2)
    await bus.settle(first, "ack")  # an acknowledgement is no lock: the late one still removes the work
    await bus.transport.flush()
    await asyncio.sleep(0.05)
    assert await size(bus, bus.subjects.work_stream) == 0


async def test_progress_prolongs_the_wait(bus: Bus) -> None:
    fetch = await _queue(bus, ack_wait_s=ACK_WAIT_S)
    await bus.append(bus.subjects.work("smol", "normal"), item("x"))
    (delivery,) = await fetch()
    for _ in range(4):
        await asyncio.sleep(ACK_WAIT_S / 2)
        await bus.settle(delivery, "progress")
    assert await fetch(timeout_s=0.05) == []


async def test_retry_gives_the_work_back_at_once_and_terminate_drops_it(bus: Bus) -> None:
    fetch = await _queue(bus)
    await bus.append(bus.subjects.work("smol", "normal"), item("x"))
    (delivery,) = await fetch()
    await bus.settle(delivery, "retry")
    (again,) = await fetch()
    assert again.num_delivered == 2
    await bus.settle(again, "terminate")
    await bus.transport.flush()
    assert await fetch(timeout_s=0.1) == []


async def test_undecodable_work_is_delivered_with_its_error_so_that_it_can_be_answered(bus: Bus) -> None:
    fetch = await _queue(bus)
    await bus.transport.append(bus.subjects.work("smol", "normal"), b"{", {"Reply-Somewhere": "x"})
    (delivery,) = await fetch()
    assert delivery.message is None
    assert isinstance(delivery.error, MalformedMessage)
    assert delivery.headers["Reply-Somewhere"] == "x"


async def test_ensuring_the_consumer_again_keeps_what_is_pending(bus: Bus, connect_bus: Connect) -> None:
    fetch = await _queue(bus)
    await bus.append(bus.subjects.work("smol", "normal"), item("x"))
    assert names(await fetch()) == ["x"]
    again = await _queue(await connect_bus(), ack_wait_s=20.0)
    assert await again(timeout_s=0.1) == []
