"""What the message system in memory adds to the common behaviour: a clock of the test's own, wildcards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Unavailable
from services.runtime.memory_transport import MemoryServer, matches
from services.runtime.transport import ConsumerSpec, StreamSpec


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        ("a.*.c", "a.b.c", True),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


tokens = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(tokens, st.data())
def test_a_subject_matches_itself_with_any_token_starred(subject: list[str], data: st.DataObject) -> None:
    pattern = [data.draw(st.sampled_from([token, "*"])) for token in subject]
    assert matches(".".join(pattern), ".".join(subject))
    assert matches(">", ".".join(subject))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_time_is_the_tests_own() -> None:
    clock = Clock()
    transport = MemoryServer(clock=clock).connect()
    await transport.ensure_stream(StreamSpec("S", ["s.>"], max_age_s=60, duplicate_window_s=10))
    await transport.ensure_stream(StreamSpec("W", ["w"], work_queue=True))
    await transport.ensure_consumer(ConsumerSpec("W", "c", "w", ack_wait_s=30))

    await transport.append("s.long", b"", {"Nats-Msg-Id": "1"})
    await transport.append("s.short", b"", {"Nats-TTL": "5s"})
    await transport.append("w", b"", {})
    assert len(await transport.fetch("W", "c", 1, 0)) == 1
    clock.now += 5
    assert await transport.last("S", "s.short") is None
    assert (await transport.append("s.long", b"", {"Nats-Msg-Id": "1"})).duplicate
    assert await transport.fetch("W", "c", 1, 0) == []
    clock.now += 25
    (again,) = await transport.fetch("W", "c", 1, 0)
    assert again.num_delivered == 2
    assert not (await transport.append("s.long", b"", {"Nats-Msg-Id": "1"})).duplicate
    clock.now += 59
    assert len(await transport.read("S", "s.long", 0)) == 1
    clock.now += 1
    assert await transport.num_messages("S") == 0


async def test_closed_connection_refuses() -> None:
    transport = MemoryServer().connect()
    transport.on_reconnect(lambda: None)
    await transport.close()
    assert not transport.state.is_connected
    with pytest.raises(Unavailable):
        await transport.publish("s", b"", {})


async def test_core_message_on_a_streams_subject_is_stored() -> None:
    transport = MemoryServer().connect()
    await transport.ensure_stream(StreamSpec("S", ["s.>"]))
    await transport.publish("s.x", b"1", {})
    assert await transport.num_messages("S") == 1
