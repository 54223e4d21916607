"""One behaviour of the bus, over NATS and in memory: core messages, requests, errors, traces."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from schemas.control import Cancel
from schemas.errors import (
    BY_CODE,
    Conflict,
    ContextLengthExceeded,
    InternalError,
    InvalidParameter,
    MalformedMessage,
    NatterjackError,
    PayloadTooLarge,
    QueueFull,
    SchemaVersionUnsupported,
    Unavailable,
)
from schemas.generation import Accepted, GenerateRequest
from services.runtime.bus import Bus, Incoming
from services.runtime.telemetry import TRACE_HEADER
from services.runtime.transport import HEADER_OVERHEAD_BYTES, NoAnswer, NoResponders, RawMessage

Eventually = Callable[..., Awaitable[None]]
Connect = Callable[..., Awaitable[Bus]]


def cancel(number: int | str) -> Cancel:
    return Cancel(request_id=str(number))


async def accept(incoming: Incoming[GenerateRequest]) -> Accepted:
    request = incoming.message
    return Accepted(request_id=request.request_id or "none", model="smol", num_prompt_tokens=1, created_s=1.0)


async def ask(bus: Bus, request_id: str = "r", **options: Any) -> Accepted:
    request = GenerateRequest(prompt="x", request_id=request_id)
    return await bus.request(
        bus.subjects.generate("smol"), request, Accepted, timeout_s=options.pop("timeout_s", 5), **options
    )


# ---- publish and subscribe


async def test_messages_of_one_publisher_arrive_complete_and_in_order(
    bus: Bus, connect_bus: Connect, eventually: Eventually
) -> None:
    seen: list[str] = []
    await bus.subscribe(bus.subjects.cancel_all, Cancel, lambda incoming: seen.append(incoming.message.request_id))
    await bus.transport.flush()
    other = await connect_bus()
    for number in range(500):
        await other.publish(bus.subjects.cancel(str(number % 7)), cancel(number))
    await eventually(lambda: len(seen) == 500)
    assert seen == [str(number) for number in range(500)]


async def test_subscriber_sees_subject_headers_and_reply(bus: Bus, eventually: Eventually) -> None:
    seen: list[Incoming[Cancel]] = []
    await bus.subscribe(bus.subjects.cancel_all, Cancel, seen.append)
    await bus.publish(bus.subjects.cancel("a.b"), cancel("a.b"), reply="somewhere")
    await eventually(lambda: seen)
    assert seen[0].subject == bus.subjects.cancel("a.b")
    assert seen[0].headers["Nj-Schema"] == "cancel/1"
    assert seen[0].reply == "somewhere"


async def test_undecodable_message_is_logged_and_the_next_one_arrives(
    bus: Bus, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    await bus.subscribe(bus.subjects.cancel_all, Cancel, lambda incoming: seen.append(incoming.message.request_id))
    subject = bus.subjects.cancel("x")
    await bus.transport.publish(subject, b"{", {})
    await bus.transport.publish(subject, b'{"request_id": "x"}', {"Nj-Schema": "cancel/9"})
    await bus.transport.publish(subject, b'{"request_id": "good"}', {})
    await eventually(lambda: seen)
    assert seen == ["good"]
    assert sum("dropped a message" in record.message for record in caplog.records) == 2


async def test_raising_callback_does_not_stop_the_subscription(bus: Bus, eventually: Eventually) -> None:
    seen: list[str] = []

    def receive(incoming: Incoming[Cancel]) -> None:
        if incoming.message.request_id == "bad":
            raise ValueError("a bug")
        seen.append(incoming.message.request_id)

    await bus.subscribe(bus.subjects.cancel_all, Cancel, receive)
    for name in ("bad", "good", "bad", "better"):
        await bus.publish(bus.subjects.cancel(name), cancel(name))
    await eventually(lambda: seen == ["good", "better"])


async def test_closed_subscription_receives_no_more(bus: Bus) -> None:
    seen: list[str] = []
    subscription = await bus.subscribe(
        bus.subjects.cancel_all, Cancel, lambda incoming: seen.append(incoming.message.request_id)
    )
    await subscription.close()
    await bus.publish(bus.subjects.cancel("x"), cancel("x"))
    await bus.transport.flush()
    await asyncio.sleep(0.02)
    assert seen == []
    await subscription.close()


async def test_queue_group_gives_each_message_to_one_member(
    bus: Bus, connect_bus: Connect, eventually: Eventually
) -> None:
    seen: list[tuple[int, str]] = []
    for number in range(3):
        member = await connect_bus()
        await member.subscribe(
            bus.subjects.cancel_all,
            Cancel,
            lambda incoming, number=number: seen.append((number, incoming.message.request_id)),  # type: ignore[misc]
            queue="group",
        )
        await member.transport.flush()
    for number in range(100):
        await bus.publish(bus.subjects.cancel("x"), cancel(number))
    await eventually(lambda: len(seen) == 100)
    await asyncio.sleep(0.02)
    assert sorted(int(request) for _, request in seen) == list(range(100))
    assert {number for number, _ in seen} == {0, 1, 2}


async def test_two_prefixes_do_not_see_each_other(connect_bus: Connect, bus: Bus) -> None:
    other = await connect_bus(prefix=f"{bus.subjects.prefix}x")
    seen: list[object] = []
    await other.subscribe(other.subjects.cancel_all, Cancel, seen.append)
    await other.transport.flush()
    await bus.publish(bus.subjects.cancel("x"), cancel("x"))
    await bus.append(bus.subjects.out("x"), cancel("x"))
    await bus.kv_put(bus.subjects.registry, "x", cancel("x"))
    await bus.transport.flush()
    await asyncio.sleep(0.02)
    assert seen == []
    assert await other.read(other.subjects.out_stream, other.subjects.out("x"), Cancel) == []
    assert await other.kv_entries(other.subjects.registry, Cancel) == []


# ---- request and reply


async def test_request_is_answered_by_the_handlers_reply(bus: Bus, connect_bus: Connect) -> None:
    server = await connect_bus()
    await server.serve(bus.subjects.generate("smol"), GenerateRequest, accept)
    await server.transport.flush()
    answers = await asyncio.gather(*(ask(bus, f"r{number}") for number in range(50)))
    assert [answer.request_id for answer in answers] == [f"r{number}" for number in range(50)]


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
async def test_coded_error_of_the_handler_is_raised_again_at_the_client(bus: Bus, kind: type[NatterjackError]) -> None:
    async def refuse(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise kind("zu groß,\nsorry 🐸", param="prompt", num_tokens=9000)

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, refuse)
    with pytest.raises(kind) as caught:
        await ask(bus)
    assert type(caught.value) is kind
    assert caught.value.message == "zu groß,\nsorry 🐸"
    assert (caught.value.param, caught.value.details) == ("prompt", {"num_tokens": 9000})


async def test_error_reply_has_the_headers_of_the_nats_service_convention(bus: Bus) -> None:
    async def refuse(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise ContextLengthExceeded("Too\r\nlong 🐸.")

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, refuse)
    reply = await bus.transport.request(bus.subjects.generate("smol"), b'{"prompt":"x"}', {}, 5)
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    assert reply.headers["Nats-Service-Error"].isascii()
    assert "long" in reply.headers["Nats-Service-Error"]


async def test_nobody_there_is_told_at_once(bus: Bus) -> None:
    async with asyncio.timeout(2):
        with pytest.raises(NoResponders) as caught:
            await ask(bus, timeout_s=30)
    assert isinstance(caught.value, Unavailable)


async def test_no_answer_in_time_is_unavailable(bus: Bus) -> None:
    async def sleep(incoming: Incoming[GenerateRequest]) -> Accepted:
        await asyncio.sleep(0.5)
        return await accept(incoming)

    server = await bus.serve(bus.subjects.generate("smol"), GenerateRequest, sleep)
    with pytest.raises(NoAnswer, match=r"0\.05 s"):
        await ask(bus, timeout_s=0.05)
    await server.close()


async def test_bug_in_a_handler_is_an_internal_error_that_tells_nothing(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise KeyError("the-secret-prompt")

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, break_down)
    with caplog.at_level(logging.ERROR), pytest.raises(InternalError) as caught:
        await ask(bus)
    assert caught.value.code == "internal_error"
    assert "secret" not in str(caught.value.body())
    assert "KeyError" not in str(caught.value.body())
    assert caplog.records[-1].exc_info is not None


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        (b"{", {}, MalformedMessage),
        (b'{"temperature": "hot"}', {}, InvalidParameter),
        (b"{}", {"Nj-Schema": "generate_request/2"}, SchemaVersionUnsupported),
    ],
)
async def test_wrong_request_is_refused_before_the_handler(
    bus: Bus, body: bytes, headers: dict[str, str], error: type[NatterjackError]
) -> None:
    async def never(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise AssertionError("reached the handler")

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, never)
    reply = await bus.transport.request(bus.subjects.generate("smol"), body, headers, 5)
    assert f'"code":"{error.code}"'.encode() in reply.body


async def test_beyond_the_concurrency_limit_requests_are_refused_at_once(bus: Bus) -> None:
    release = asyncio.Event()

    async def hold(incoming: Incoming[GenerateRequest]) -> Accepted:
        await release.wait()
        return await accept(incoming)

    server = await bus.serve(bus.subjects.generate("smol"), GenerateRequest, hold, max_concurrent=2)
    running = [asyncio.create_task(ask(bus, f"r{number}")) for number in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull):
        await ask(bus)
    release.set()
    assert [answer.request_id for answer in await asyncio.gather(*running)] == ["r0", "r1"]
    assert (await ask(bus, "later")).request_id == "later"
    await server.close()


async def test_closing_a_server_lets_running_requests_finish(bus: Bus) -> None:
    async def work(incoming: Incoming[GenerateRequest]) -> Accepted:
        await asyncio.sleep(0.1)
        return await accept(incoming)

    server = await bus.serve(bus.subjects.generate("smol"), GenerateRequest, work)
    running = asyncio.create_task(ask(bus))
    await asyncio.sleep(0.03)
    await server.close()
    assert (await running).request_id == "r"
    with pytest.raises(NoResponders):
        await ask(bus)


async def test_message_without_a_reply_subject_is_served_and_its_error_logged(
    bus: Bus, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, accept)
    await bus.publish(bus.subjects.generate("smol"), GenerateRequest(prompt="x"))
    await bus.transport.publish(bus.subjects.generate("smol"), b"{", {})
    await eventually(lambda: any("without a reply subject" in record.message for record in caplog.records))


async def test_error_can_be_published_to_a_reply_subject(bus: Bus, eventually: Eventually) -> None:
    seen: list[RawMessage] = []
    inbox = bus.transport.new_inbox()
    assert inbox != bus.transport.new_inbox()
    await bus.transport.subscribe(inbox, seen.append)
    await bus.publish_error(inbox, Conflict("no"))
    await eventually(lambda: seen)
    assert seen[0].headers["Nats-Service-Error-Code"] == "409"


# ---- sizes


@pytest.mark.parametrize("send", ["publish", "request", "append"])
async def test_payload_counts_with_its_headers(bus: Bus, send: str) -> None:
    headers = {"Nj-Schema": "cancel/1"}
    room = bus.transport.max_payload - HEADER_OVERHEAD_BYTES - len("Nj-Schema") - len("cancel/1") - 4
    subject = bus.subjects.out("big")
    extra = (5.0,) if send == "request" else ()
    with pytest.raises(PayloadTooLarge):
        await getattr(bus.transport, send)(subject, b"x" * (room + 1), headers, *extra)
    await bus.transport.append(subject, b"x" * room, headers)
    assert bus.transport.state.is_connected
    stored = await bus.transport.last(bus.subjects.out_stream, subject)
    assert stored is not None
    assert len(stored.body) == room


async def test_reply_that_is_too_large_is_told_as_such(bus: Bus) -> None:
    async def too_much(incoming: Incoming[GenerateRequest]) -> Accepted:
        big = "x" * bus.transport.max_payload
        return Accepted(request_id=big, model="smol", num_prompt_tokens=1, created_s=1.0)

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, too_much)
    with pytest.raises(PayloadTooLarge):
        await ask(bus)


# ---- traces


async def test_request_is_one_trace_over_both_sides(
    bus: Bus, connect_bus: Connect, span_exporter: InMemorySpanExporter
) -> None:
    server = await connect_bus()

    async def answer(incoming: Incoming[GenerateRequest]) -> Accepted:
        with server.tracing.span("tokenize"):
            return await accept(incoming)

    await server.serve(bus.subjects.generate("smol"), GenerateRequest, answer)
    await server.transport.flush()
    with bus.tracing.span("client"):
        await ask(bus)
    await asyncio.sleep(0.01)
    spans = {span.name: span for span in span_exporter.get_finished_spans()}
    assert set(spans) == {"client", "request generate_request", "process generate_request", "tokenize"}
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    parents = {
        name: next((other.name for other in spans.values() if span.parent and other.context
                    and other.context.span_id == span.parent.span_id), None)
        for name, span in spans.items()
    }  # fmt: skip
    assert parents == {
        "client": None,
        "request generate_request": "client",
        "process generate_request": "request generate_request",
        "tokenize": "process generate_request",
    }
    assert spans["request generate_request"].kind is SpanKind.PRODUCER
    assert spans["process generate_request"].kind is SpanKind.CONSUMER
    attributes = spans["process generate_request"].attributes or {}
    assert attributes["messaging.destination.name"] == bus.subjects.generate("smol")


async def test_what_services_say_to_each_other_by_themselves_begins_no_trace(
    bus: Bus, span_exporter: InMemorySpanExporter
) -> None:
    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, accept, begins_traces=False)
    await ask(bus)
    assert span_exporter.get_finished_spans() == ()
    with bus.tracing.span("client"):
        await ask(bus)
    await asyncio.sleep(0.01)
    assert len({span.context.trace_id for span in span_exporter.get_finished_spans() if span.context}) == 1
    assert len(span_exporter.get_finished_spans()) == 3


async def test_failed_request_marks_the_span_with_its_code(bus: Bus, span_exporter: InMemorySpanExporter) -> None:
    async def refuse(incoming: Incoming[GenerateRequest]) -> Accepted:
        raise ContextLengthExceeded("Too long.")

    await bus.serve(bus.subjects.generate("smol"), GenerateRequest, refuse)
    with pytest.raises(ContextLengthExceeded):
        await ask(bus)
    await asyncio.sleep(0.01)
    for span in span_exporter.get_finished_spans():
        assert span.status.status_code is StatusCode.ERROR, span.name
        assert (span.attributes or {})["error.type"] == "context_length_exceeded"


async def test_published_and_stored_messages_carry_the_trace(bus: Bus, eventually: Eventually) -> None:
    seen: list[Incoming[Cancel]] = []
    await bus.subscribe(bus.subjects.cancel_all, Cancel, seen.append)
    with bus.tracing.span("work") as span:
        await bus.publish(bus.subjects.cancel("x"), cancel("x"))
        await bus.append(bus.subjects.out("x"), cancel("x"))
    await eventually(lambda: seen)
    stored = await bus.transport.last(bus.subjects.out_stream, bus.subjects.out("x"))
    assert stored is not None
    for headers in (seen[0].headers, stored.headers):
        assert f"{span.get_span_context().trace_id:032x}" in headers[TRACE_HEADER]
