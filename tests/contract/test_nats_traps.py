"""What a real nats-server and its client do to the careless, and that the transport is not.

Each test makes one trap of the server or the client spring; afterwards the same connection must still work.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.codec import encode
from schemas.control import Cancel, Registration
from schemas.errors import PayloadTooLarge, Unavailable
from schemas.subjects import Subjects
from services.recording.wiretap import INBOXES
from services.runtime import nats_connection, nats_transport
from services.runtime.bus import Bus, Incoming, open_bus
from services.runtime.nats_transport import connect_nats
from services.runtime.registry import Heartbeat, Registry
from services.runtime.settings import BusSettings
from services.runtime.streams import ensure_streams, stream_specs, work_consumer
from services.runtime.telemetry import Tracing
from services.runtime.transport import NoAnswer, RawMessage, StoredMessage

Eventually = Callable[..., Awaitable[None]]
Connect = Callable[..., Awaitable[Bus]]
StartNats = Callable[..., Any]


def cancel(name: str) -> Cancel:
    return Cancel(request_id=name)


def registration(instance: str, **changes: Any) -> Registration:
    values = {"incarnation": "i", "role": "executor", "model": "smol", "state": "ready", "heartbeat_s": 0.1}
    return Registration.model_validate({"instance": instance, **values, **changes})


@asynccontextmanager
async def connection(server: Any, tracing: Tracing, **settings: Any) -> AsyncIterator[Bus]:
    chosen = BusSettings(url=server.url, **settings)
    async with open_bus(chosen, tracing, name="test") as bus:
        await ensure_streams(bus.transport, bus.subjects, chosen)
        yield bus


async def assert_works(bus: Bus) -> None:
    """Check a round trip through subscription, stream and bucket."""
    arrived = asyncio.Event()
    subscription = await bus.subscribe(bus.subjects.cancel("alive"), Cancel, lambda incoming: arrived.set())
    await bus.publish(bus.subjects.cancel("alive"), cancel("alive"))
    await asyncio.wait_for(arrived.wait(), 5)
    await subscription.close()
    await bus.append(bus.subjects.out("alive"), cancel("alive"))
    await bus.kv_put(bus.subjects.registry, "alive", cancel("alive"))
    assert await bus.kv_get(bus.subjects.registry, "alive", Cancel) is not None


# ---- starting up


async def test_unreachable_server_is_told_within_the_timeout_and_without_the_password(tracing: Tracing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"Cannot reach NATS .*natterjack up") as caught:
        await connect_nats(f"nats://ann:secret@127.0.0.1:{port}", name="test", timeout_s=0.7)
    assert time.monotonic() - start < 3
    assert "secret" not in caught.value.message
    assert "***@127.0.0.1" in caught.value.message


async def test_something_that_is_no_nats_server_is_told_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable, match="Cannot reach NATS"):
        await connect_nats(f"nats://127.0.0.1:{silent.getsockname()[1]}", name="test", timeout_s=0.5)


@pytest.mark.parametrize("url", ["nonsense://127.0.0.1:1", "nats://127.0.0.1:port"])
async def test_address_that_cannot_be_read_is_unavailable(url: str) -> None:
    with pytest.raises(Unavailable, match="Cannot reach NATS"):
        await connect_nats(url, name="test", timeout_s=0.5)


async def test_server_that_comes_up_late_is_waited_for(start_nats: StartNats) -> None:
    server = start_nats()
    server.kill()
    connecting = asyncio.create_task(connect_nats(server.url, name="test", timeout_s=10))
    await asyncio.sleep(0.3)
    server.start()
    transport = await connecting
    assert transport.state.is_connected
    await transport.close()


async def test_server_without_jetstream_is_told_with_what_to_do(start_nats: StartNats) -> None:
    server = start_nats(jetstream=False)
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"JetStream.*-js"):
        await connect_nats(server.url, name="test", timeout_s=10)
    assert time.monotonic() - start < 5


async def test_wrong_password_is_named_as_the_cause(start_nats: StartNats) -> None:
    server = start_nats(options="authorization { user: ann, password: right }")
    url = server.url.replace("//", "//ann:wrong@")
    with pytest.raises(Unavailable, match=r"(?i)authorization") as caught:
        await connect_nats(url, name="test", timeout_s=1)
    assert "wrong" not in caught.value.message


async def test_streams_can_be_ensured_by_everyone_at_once_and_again(connect_nats_bus: Connect) -> None:
    buses = [await connect_nats_bus() for _ in range(3)]
    subjects, settings = Subjects(f"{buses[0].subjects.prefix}new"), BusSettings()
    await asyncio.gather(*(ensure_streams(bus.transport, subjects, settings) for bus in buses))
    await buses[0].append(subjects.out("r"), cancel("kept"))
    await asyncio.gather(*(ensure_streams(bus.transport, subjects, settings) for bus in buses))
    assert await buses[1].transport.num_messages(subjects.out_stream) == 1


async def test_every_stream_has_limits() -> None:
    for spec in stream_specs(Subjects("nj"), BusSettings()):
        assert spec.max_bytes > 0, spec.name


async def test_stream_that_does_not_fit_on_the_server_is_told(start_nats: StartNats, tracing: Tracing) -> None:
    server = start_nats(jetstream=False, options="jetstream { max_file_store: 100MB, max_memory_store: 100MB }")
    async with open_bus(BusSettings(url=server.url), tracing, name="test") as bus:
        with pytest.raises(Exception, match="NJ_WORK") as caught:
            await ensure_streams(bus.transport, bus.subjects, BusSettings())
    assert getattr(caught.value, "code", None) == "queue_full"


# ---- the connection survives


async def test_message_over_the_servers_limit_is_refused_here_and_the_connection_lives(
    start_nats: StartNats, tracing: Tracing
) -> None:
    server = start_nats(options="max_payload: 4096")
    async with connection(server, tracing) as bus:
        assert bus.transport.max_payload == 4096
        body = b"x" * 4090  # fits by itself, but not with its headers
        for send in (bus.transport.publish, bus.transport.append):
            with pytest.raises(PayloadTooLarge, match="4096"):
                await send(bus.subjects.out("r"), body, {"Name": "value"})
        await assert_works(bus)
        assert bus.transport.state.num_reconnects == 0


async def test_raising_callbacks_do_not_end_the_read_loop(connect_nats_bus: Connect, eventually: Eventually) -> None:
    bus = await connect_nats_bus()
    calls: list[str] = []

    def fail(message: object) -> None:
        calls.append("called")
        raise RuntimeError("a bug")

    await bus.transport.subscribe(bus.subjects.cancel("x"), fail)
    await bus.serve(bus.subjects.cache("x"), Cancel, fail)  # type: ignore[arg-type]
    for _ in range(3):
        await bus.publish(bus.subjects.cancel("x"), cancel("x"))
        await bus.publish(bus.subjects.cache("x"), cancel("x"))
    await eventually(lambda: len(calls) == 6)
    await assert_works(bus)


async def test_refused_permission_is_noted_as_a_problem_and_the_connection_lives(
    start_nats: StartNats, tracing: Tracing, eventually: Eventually
) -> None:
    server = start_nats(
        options="""authorization { users: [
            { user: ann, password: x, permissions: { publish: { deny: ["secret"] }, subscribe: { deny: ["secret"] } } }
        ] }"""
    )
    server_url = server.url.replace("//", "//ann:x@")
    transport = await connect_nats(server_url, name="test", timeout_s=5)
    try:
        await transport.publish("secret", b"", {})
        await eventually(lambda: any("ermission" in problem for problem in transport.state.problems))
        await transport.flush()
        assert transport.state.is_connected
    finally:
        await transport.close()


async def test_many_problems_are_not_kept_for_ever(connect_nats_bus: Connect) -> None:
    bus = await connect_nats_bus()
    for number in range(100):
        await bus.transport._connection._on_error(RuntimeError(f"{number} " + "x" * 10_000))  # type: ignore[attr-defined]
    assert len(bus.transport.state.problems) == nats_connection.MAX_PROBLEMS
    assert sum(map(len, bus.transport.state.problems)) < 10_000


def publish_raw(server: Any, subject: bytes) -> None:
    """Publish as a client does that does not check its subjects."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.recv(4096)
        raw.sendall(b'CONNECT {"verbose":false}\r\nPUB ' + subject + b" 0\r\n\r\nPING\r\n")
        raw.recv(4096)


async def test_subject_that_is_no_utf8_ends_in_a_reconnection_not_in_silence(
    start_nats: StartNats, tracing: Tracing, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "WATCHDOG_PERIOD_S", 0.1)
    server = start_nats()
    async with connection(server, tracing) as bus:
        seen: list[str] = []
        await bus.subscribe(bus.subjects.cancel_all, Cancel, lambda incoming: seen.append(incoming.message.request_id))
        reconnected: list[bool] = []
        bus.transport.on_reconnect(lambda: reconnected.append(True))
        await bus.transport.flush()
        publish_raw(server, b"nj.v1.cancel.\xff\xfe")
        await eventually(lambda: reconnected)
        assert bus.transport.state.num_reconnects == 1
        await bus.publish(bus.subjects.cancel("after"), cancel("after"))
        await eventually(lambda: seen == ["after"])
        await assert_works(bus)


async def test_cancellation_that_comes_together_with_the_reply_is_not_lost(
    connect_nats_bus: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect_nats_bus()
    requests = bus.transport._connection.requests  # type: ignore[attr-defined]
    hear = requests._hear

    async def cancel_at_the_reply(message: Any) -> None:
        await hear(message)
        task.cancel()

    monkeypatch.setattr(requests, "_hear", cancel_at_the_reply)
    task = asyncio.create_task(bus.append(bus.subjects.out("r"), cancel("x")))
    with pytest.raises(asyncio.CancelledError):
        await task


# ---- the server restarts


async def test_after_a_restart_of_the_server_everything_works_again(
    start_nats: StartNats, tracing: Tracing, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_transport, "MAX_FETCH_S", 2.5)
    server = start_nats()
    async with connection(server, tracing) as bus, connection(server, tracing) as other:
        consumer = work_consumer(bus.subjects, "smol", "normal", 30)
        await bus.transport.ensure_consumer(consumer)
        async with Registry(other) as registry:
            beats = Heartbeat(bus, registration("executor-0"))
            beats.start()
            await eventually(lambda: registry.missing(["executor"]) == [])
            await bus.append(bus.subjects.out("r"), cancel("stored before"))
            seen: list[str] = []
            await other.subscribe(
                bus.subjects.cancel_all, Cancel, lambda incoming: seen.append(incoming.message.request_id)
            )
            fetching = asyncio.create_task(bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=60))
            await asyncio.sleep(0.1)
            server.kill()
            await eventually(lambda: not bus.transport.state.is_connected)
            with pytest.raises(Unavailable):
                await bus.request("nobody", cancel("x"), Cancel, timeout_s=0.2)
            await eventually(lambda: registry.missing(["executor"]) == ["executor"])
            server.start()
            await eventually(lambda: bus.transport.state.is_connected and other.transport.state.is_connected)
            await eventually(lambda: registry.missing(["executor"]) == [])
            await bus.publish(bus.subjects.cancel("x"), cancel("after"))
            await eventually(lambda: seen == ["after"])
            last = await bus.last(bus.subjects.out_stream, bus.subjects.out("r"), Cancel)
            assert last is not None
            assert last.message.request_id == "stored before"
            assert await asyncio.wait_for(fetching, 8) == []
            await bus.append(bus.subjects.work("smol", "normal"), cancel("work"))
            (delivery,) = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=5)
            await bus.settle(delivery, "ack")
            await beats.leave()
            await assert_works(bus)


async def test_after_a_restart_with_an_empty_store_the_streams_are_made_again(
    start_nats: StartNats, tracing: Tracing, eventually: Eventually
) -> None:
    server = start_nats()
    async with connection(server, tracing) as bus:
        consumer = work_consumer(bus.subjects, "smol", "normal", 30)
        await bus.transport.ensure_consumer(consumer)
        reconnected = asyncio.Event()
        bus.transport.on_reconnect(reconnected.set)
        server.kill()
        (server.directory / "store").rename(server.directory / "lost")
        server.start()
        await asyncio.wait_for(reconnected.wait(), 10)
        await assert_works(bus)
        await bus.append(bus.subjects.work("smol", "normal"), cancel("work"))
        (delivery,) = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=5)
        assert delivery.message == cancel("work")


async def test_raising_reconnect_callback_does_not_keep_the_others_from_being_called(
    start_nats: StartNats, tracing: Tracing
) -> None:
    server = start_nats()
    async with connection(server, tracing) as bus:
        called = asyncio.Event()

        def fail() -> None:
            raise RuntimeError("a bug")

        bus.transport.on_reconnect(fail)
        bus.transport.on_reconnect(called.set)
        server.kill()
        server.start()
        await asyncio.wait_for(called.wait(), 10)


async def test_closing_while_the_server_is_gone_neither_hangs_nor_raises(
    start_nats: StartNats, tracing: Tracing, eventually: Eventually
) -> None:
    server = start_nats()
    async with asyncio.timeout(8):
        async with connection(server, tracing) as bus:
            subscription = await bus.subscribe(bus.subjects.cancel_all, Cancel, lambda incoming: None)
            server.kill()
            await eventually(lambda: not bus.transport.state.is_connected)
        await subscription.close()
        with pytest.raises(Unavailable):
            await bus.publish(bus.subjects.cancel("x"), cancel("x"))
        with pytest.raises(Unavailable):
            await bus.subscribe(bus.subjects.cancel_all, Cancel, lambda incoming: None)
        with pytest.raises(Unavailable):
            await bus.transport.flush()


# ---- consumers, heartbeats


async def test_deleted_consumer_is_an_error_not_an_empty_queue(connect_nats_bus: Connect) -> None:
    bus = await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)
    assert await bus.fetch(consumer.stream, consumer.name, Cancel, batch=2, timeout_s=0.1) == []
    await bus.transport.request(f"$JS.API.CONSUMER.DELETE.{consumer.stream}.{consumer.name}", b"", {}, 5)

    async def fetch_thrice() -> None:
        for _ in range(3):
            await bus.fetch(consumer.stream, consumer.name, Cancel, batch=2, timeout_s=0.3)

    with pytest.raises(Unavailable):
        await fetch_thrice()
    await bus.transport.ensure_consumer(consumer)
    await bus.append(bus.subjects.work("smol", "normal"), cancel("x"))
    assert len(await bus.fetch(consumer.stream, consumer.name, Cancel, batch=2, timeout_s=1)) == 1


async def test_second_overlapping_consumer_on_the_work_queue_is_refused(connect_nats_bus: Connect) -> None:
    bus = await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)
    with pytest.raises(Unavailable):
        await bus.transport.ensure_consumer(type(consumer)(consumer.stream, "other", consumer.subject, ack_wait_s=30))


async def test_entry_of_a_worker_that_died_vanishes_although_it_was_updated(connect_nats_bus: Connect) -> None:
    bus = await connect_nats_bus()
    beats = Heartbeat(bus, registration("executor-0", silent_after_s=0.5))
    beats.start()
    for number in range(3):
        await asyncio.sleep(0.1)
        beats.update(stage=f"step {number}")
    await asyncio.sleep(0.1)
    entries = await bus.kv_entries(bus.subjects.registry, Registration)
    assert [entry.message.stage for entry in entries] == ["step 2"]
    assert beats._task is not None
    beats._task.cancel()  # as if it were killed: nothing is taken away
    async with asyncio.timeout(5):
        while await bus.kv_entries(bus.subjects.registry, Registration):
            await asyncio.sleep(0.1)


async def test_acknowledging_does_not_echo_the_works_headers(connect_nats_bus: Connect, nats_server: Any) -> None:
    bus = await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)
    seen: list[Any] = []
    await bus.transport.subscribe(f"$JS.ACK.{consumer.stream}.>", seen.append)
    await bus.append(bus.subjects.work("smol", "normal"), cancel("x"), message_id="m1")
    (delivery,) = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=1)
    await bus.settle(delivery, "ack")
    await bus.transport.flush()
    await asyncio.sleep(0.05)
    assert [(raw.body, dict(raw.headers)) for raw in seen] == [(b"+ACK", {})]


async def test_log_that_the_server_could_not_send_at_once_is_read_in_pages(
    connect_nats_bus: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_transport, "READ_BYTES", 2000)
    bus = await connect_nats_bus()
    for number in range(20):
        await bus.append(bus.subjects.out("r"), cancel(f"{number:03}" + "x" * 500))
        await bus.append(bus.subjects.out("other"), cancel("other"))
    stored = await bus.read(bus.subjects.out_stream, bus.subjects.out("r"), Cancel)
    assert [entry.message.request_id[:3] for entry in stored] == [f"{number:03}" for number in range(20)]
    assert bus.transport.state.num_reconnects == 0


async def test_stored_message_is_returned_whatever_its_size(start_nats: StartNats, tracing: Tracing) -> None:
    server = start_nats(options="max_payload: 4096")
    async with connection(server, tracing) as bus:
        subject = bus.subjects.out("big")
        await bus.transport.append(subject, b"x" * 4080, {})
        stored = await bus.transport.last(bus.subjects.out_stream, subject)
        assert isinstance(stored, StoredMessage)
        assert [len(entry.body) for entry in await bus.transport.read(bus.subjects.out_stream, subject, 0)] == [4080]


async def test_flush_vouches_for_the_subscriptions_before_it(connect_nats_bus: Connect) -> None:
    """The client's own flush sends its ping ahead of what it has yet to write."""
    bus, other = await connect_nats_bus(), await connect_nats_bus()
    replies: set[asyncio.Task[None]] = set()

    def answer(message: RawMessage) -> None:
        replies.add(asyncio.create_task(other.transport.publish(message.reply or "", b"", {})))

    for number in range(50):
        for _ in range(4):  # enough that the socket cannot take everything at once
            await other.transport.publish("nobody", bytes(500_000), {})
        await other.transport.subscribe(f"flushed.{number}", answer)
        await other.transport.flush()
        await bus.transport.request(f"flushed.{number}", b"", {}, 5)
    await asyncio.gather(*replies)


async def test_answer_that_the_connection_takes_along_is_not_waited_for(
    start_nats: StartNats, tracing: Tracing
) -> None:
    server = start_nats()
    async with connection(server, tracing) as bus, connection(server, tracing) as silent:
        await silent.transport.subscribe("silent", lambda message: None)
        await silent.transport.flush()
        asking = asyncio.create_task(bus.request("silent", cancel("x"), Cancel, timeout_s=60))
        await asyncio.sleep(0.1)
        server.kill()
        with pytest.raises(NoAnswer):
            await asyncio.wait_for(asking, 10)


async def test_abandoned_fetch_swallows_no_work(connect_nats_bus: Connect) -> None:
    """The server would hand the next message to a pull request that nobody reads any more."""
    bus = await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)
    fetching = asyncio.create_task(bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=5))
    await asyncio.sleep(0.1)
    fetching.cancel()
    await asyncio.wait({fetching})
    await bus.append(bus.subjects.work("smol", "normal"), cancel("work"))
    (delivery,) = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=1, timeout_s=2)
    assert delivery.num_delivered == 1


async def test_work_is_handed_over_at_once_however_earlier_pulls_ended(connect_nats_bus: Connect) -> None:
    """The client's own fetch gives up before the server does, and then takes one pull request's end for another's."""
    bus = await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)

    async def fetch(timeout_s: float) -> list[str]:
        deliveries = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=64, timeout_s=timeout_s)
        return [delivery.message.request_id for delivery in deliveries if delivery.message is not None]

    for _ in range(3):
        assert await fetch(0.3) == []
        for name in ("first", "second", "third"):
            fetching = asyncio.create_task(fetch(5.0))
            await asyncio.sleep(0.1)
            stored_s = time.monotonic()
            await bus.append(bus.subjects.work("smol", "normal"), cancel(name))
            assert await fetching == [name]
            assert time.monotonic() - stored_s < 3, "it came, and was held back"


async def test_what_is_given_back_after_a_withdrawal_goes_to_others(connect_nats_bus: Connect) -> None:
    """A pull request for many messages stays open at the server when fewer came."""
    bus, other = await connect_nats_bus(), await connect_nats_bus()
    consumer = work_consumer(bus.subjects, "smol", "normal", 30)
    await bus.transport.ensure_consumer(consumer)
    await bus.append(bus.subjects.work("smol", "normal"), cancel("work"))
    (delivery,) = await bus.fetch(consumer.stream, consumer.name, Cancel, batch=64, timeout_s=5)
    await bus.transport.withdraw(consumer.stream, consumer.name)
    await bus.settle(delivery, "retry")
    (again,) = await other.fetch(consumer.stream, consumer.name, Cancel, batch=64, timeout_s=2)
    assert again.num_delivered == 2


async def test_the_servers_own_answers_come_to_longer_subjects_than_those_of_services(
    nats_server: Any, tracing: Tracing, eventually: Eventually
) -> None:
    """So that a recorder, which listens to answers of two and of three tokens, need not hear every acknowledgement."""
    async with (
        connection(nats_server, tracing) as asking,
        connection(nats_server, tracing) as serving,
        connection(nats_server, tracing) as ear,
    ):
        heard: list[RawMessage] = []
        for pattern in INBOXES:
            await ear.transport.subscribe(pattern, heard.append)
        await ear.transport.flush()

        async def answer(incoming: Incoming[Cancel]) -> Cancel:
            return incoming.message

        await serving.serve(serving.subjects.generate("smol"), Cancel, answer)
        await serving.transport.flush()
        await asking.append(asking.subjects.out("r"), cancel("r"))
        assert await asking.last(asking.subjects.out_stream, asking.subjects.out("r"), Cancel) is not None
        assert await asking.request(asking.subjects.generate("smol"), cancel("x"), Cancel, timeout_s=5) == cancel("x")
        await eventually(lambda: heard)
        await ear.transport.flush()
        assert [message.body for message in heard] == [encode(cancel("x"))]
