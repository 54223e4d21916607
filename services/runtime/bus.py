"""The typed bus: what services use to exchange the messages of `schemas`, over any transport.

Every message is encoded by the one codec and carries its schema and the trace context in headers. Errors of a service
travel as coded replies and come out as the same exceptions. Handlers never see bytes; the transport never sees types.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentelemetry.trace import SpanKind

from schemas.codec import SCHEMA_HEADER, Message, decode, encode, schema_of
from schemas.errors import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    Conflict,
    ErrorReply,
    InternalError,
    NatterjackError,
    QueueFull,
    from_body,
)
from schemas.subjects import Subjects
from services.runtime.metrics import Histogram, Metrics
from services.runtime.settings import BusSettings
from services.runtime.telemetry import TRACE_HEADER, Tracing, current_traceparent
from services.runtime.transport import (
    EXPECTED_LAST_HEADER,
    MESSAGE_ID_HEADER,
    TTL_HEADER,
    AckKind,
    Appended,
    RawDelivery,
    RawMessage,
    StoredMessage,
    Subscription,
    Transport,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)

KV_STREAM_PREFIX = "KV_"
KV_SUBJECT_PREFIX = "$KV."
KV_OPERATION_HEADER = "KV-Operation"
SENT_HEADER = "Natterjack-Sent"
"""When a core message left its sender, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Incoming(Generic[M]):
    """A decoded message with what came around it."""

    message: M
    subject: str
    headers: Mapping[str, str]
    reply: str | None


@dataclass(frozen=True, slots=True)
class Delivery(Generic[M]):
    """A message from a work queue; `error` instead of a message when it cannot be decoded."""

    message: M | None
    error: NatterjackError | None
    headers: Mapping[str, str]
    raw: RawDelivery

    @property
    def num_delivered(self) -> int:
        """How often this message has been handed out, this time included."""
        return self.raw.num_delivered


@dataclass(frozen=True, slots=True)
class Stored(Generic[M]):
    """A message of a stream and its sequence number, in a bucket called revision."""

    message: M
    subject: str
    sequence: int


class Bus:
    """Typed messages over one transport, for one deployment."""

    def __init__(
        self, transport: Transport, subjects: Subjects, tracing: Tracing, metrics: Metrics | None = None
    ) -> None:
        self.transport = transport
        self.subjects = subjects
        self.tracing = tracing
        self.metrics = metrics or Metrics()

    # ---- core messages

    async def publish(self, subject: str, message: Message, *, reply: str | None = None) -> None:
        """Send at most once."""
        await self.transport.publish(subject, encode(message), _stamped(_headers(message)), reply)

    async def publish_error(self, subject: str, error: NatterjackError) -> None:
        """Send a coded error, such as to the reply subject of a request that failed."""
        body = ErrorReply(error=error.body()).model_dump_json().encode()
        headers = {ERROR_CODE_HEADER: str(error.http_status), ERROR_HEADER: _header_text(error.message)}
        await self.transport.publish(subject, body, headers)

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """Send and return the one reply; raises the coded error that came instead, or Unavailable.

        A span shows the hop if it is part of a trace; what services say to each other by themselves begins none.
        """
        name = f"request {message.SCHEMA}"
        hop: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if current_traceparent() is not None:
            hop = self.tracing.span(name, kind=SpanKind.PRODUCER, attributes=_messaging(subject))
        with hop:
            started_s = time.perf_counter()
            answer = await self.transport.request(subject, encode(message), _stamped(_headers(message)), timeout_s)
            waited = self.metrics.histogram("bus_request_seconds", message.SCHEMA)
            waited.observe(time.perf_counter() - started_s)
            return decode_reply(reply, answer)

    async def subscribe(
        self, subject: str, kind: type[M], callback: Callable[[Incoming[M]], None], *, queue: str | None = None
    ) -> Subscription:
        """Call `callback` for each message in order; it only hands off. The undecodable is logged and dropped."""

        hops = self.metrics.histogram("bus_hop_seconds", kind.SCHEMA)

        def receive(raw: RawMessage) -> None:
            _observe_hop(hops, raw.headers)
            try:
                message = decode(kind, raw.headers, raw.body)
            except NatterjackError as error:
                log.warning("dropped a message on %s: %s", raw.subject, error.message)
                return
            callback(Incoming(message, raw.subject, raw.headers, raw.reply))

        return await self.transport.subscribe(subject, receive, queue)

    async def serve(
        self,
        subject: str,
        kind: type[M],
        handler: Callable[[Incoming[M]], Awaitable[Message]],
        *,
        queue: str | None = None,
        max_concurrent: int = 64,
        begins_traces: bool = True,
    ) -> "Server[M]":
        """Answer requests concurrently; beyond `max_concurrent` they are refused at once, not queued.

        A request that is part of no trace begins one, unless only services ask here.
        """
        server = Server(self, kind, handler, max_concurrent, begins_traces)
        server.subscription = await self.transport.subscribe(subject, server.receive, queue)
        return server

    # ---- streams

    async def append(
        self,
        subject: str,
        message: Message,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
    ) -> Appended:
        """Store a message; raises Conflict when `expected_last` is not the subject's last sequence, QueueFull."""
        headers = _headers(message)
        if message_id is not None:
            headers[MESSAGE_ID_HEADER] = message_id
        if expected_last is not None:
            headers[EXPECTED_LAST_HEADER] = str(expected_last)
        return await self.transport.append(subject, encode(message), headers)

    async def fetch(
        self, stream: str, consumer: str, kind: type[M], *, batch: int, timeout_s: float
    ) -> list[Delivery[M]]:
        """Return up to `batch` messages of a work queue, or none after `timeout_s`."""
        return [_delivered(kind, raw) for raw in await self.transport.fetch(stream, consumer, batch, timeout_s)]

    async def settle(self, delivery: Delivery[M], kind: AckKind) -> None:
        """Acknowledge, prolong, give back or drop a delivery."""
        await self.transport.settle(delivery.raw, kind)

    async def last(self, stream: str, subject: str, kind: type[M]) -> Stored[M] | None:
        """Return the newest message of one subject."""
        found = await self.transport.last(stream, subject)
        return None if found is None else _stored(kind, found)

    async def at(self, stream: str, sequence: int, kind: type[M]) -> Stored[M] | None:
        """Return the message of one sequence number, None when the stream has it no more."""
        found = await self.transport.at(stream, sequence)
        return None if found is None else _stored(kind, found)

    async def read(self, stream: str, subject: str, kind: type[M], *, after: int = 0) -> list[Stored[M]]:
        """Return one subject's messages with a sequence above `after`, oldest first."""
        return [_stored(kind, found) for found in await self.transport.read(stream, subject, after)]

    # ---- key-value buckets: streams with one message per key

    async def kv_put(self, bucket: str, key: str, message: Message, *, ttl_s: float | None = None) -> int:
        """Set a key; with `ttl_s` (whole seconds, ≥ 1) it vanishes unless it is put again. Returns the revision."""
        headers = {**_headers(message), **_ttl(ttl_s)}
        appended = await self.transport.append(_kv_subject(bucket, key), encode(message), headers)
        return appended.sequence

    async def kv_get(self, bucket: str, key: str, kind: type[M]) -> Stored[M] | None:
        """Return a key's value and revision."""
        found = await self.transport.last(KV_STREAM_PREFIX + bucket, _kv_subject(bucket, key))
        return None if found is None or KV_OPERATION_HEADER in found.headers else _stored(kind, found)

    async def kv_update(
        self, bucket: str, key: str, message: Message, *, revision: int, ttl_s: float | None = None
    ) -> int:
        """Set a key only if its revision still is `revision` (0: absent); raises Conflict. Returns the new revision."""
        subject, headers, body = _kv_subject(bucket, key), {**_headers(message), **_ttl(ttl_s)}, encode(message)
        try:
            return (
                await self.transport.append(subject, body, headers | {EXPECTED_LAST_HEADER: str(revision)})
            ).sequence
        except Conflict:
            marker = None if revision else await self.transport.last(KV_STREAM_PREFIX + bucket, subject)
            if marker is None or KV_OPERATION_HEADER not in marker.headers:
                raise
        expected = {EXPECTED_LAST_HEADER: str(marker.sequence)}  # absent, but the bucket remembers the deletion
        return (await self.transport.append(subject, body, headers | expected)).sequence

    async def kv_delete(self, bucket: str, key: str) -> None:
        """Remove a key, leaving the marker that other clients of the bucket expect."""
        await self.transport.append(_kv_subject(bucket, key), b"", {KV_OPERATION_HEADER: "DEL"})

    async def kv_entries(self, bucket: str, kind: type[M], *, under: str = "") -> list[Stored[M]]:
        """Return all values of a bucket, or those whose keys begin with the tokens `under`.

        One that cannot be decoded (a newer version's) is logged and left out.
        """
        entries: list[Stored[M]] = []
        keys = f"{under}.>" if under else ">"
        for found in await self.transport.last_of_each(KV_STREAM_PREFIX + bucket, _kv_subject(bucket, keys)):
            try:
                if KV_OPERATION_HEADER not in found.headers:
                    entries.append(_stored(kind, found))
            except NatterjackError as error:
                log.warning("ignored the entry %s: %s", found.subject, error.message)
        return entries

    async def kv_listen(
        self,
        bucket: str,
        kind: type[M],
        put: Callable[[str, M], None],
        deleted: Callable[[str], None],
    ) -> Subscription:
        """Call `put` or `deleted` with the key for each change from now on: a core subscription, not a consumer.

        Expiry is not reported: whoever keeps such entries judges them by their age.
        """
        prefix = f"{KV_SUBJECT_PREFIX}{bucket}."

        def receive(raw: RawMessage) -> None:
            key = raw.subject.removeprefix(prefix)
            if KV_OPERATION_HEADER in raw.headers:
                deleted(key)
                return
            try:
                put(key, decode(kind, raw.headers, raw.body))
            except NatterjackError as error:
                log.warning("ignored the entry %s of %s: %s", key, bucket, error.message)

        return await self.transport.subscribe(f"{prefix}>", receive)

    async def close(self) -> None:
        """Flush and disconnect."""
        await self.transport.close()


class Server(Generic[M]):
    """One served subject: decodes, runs the handler in a task of its own, replies."""

    def __init__(
        self,
        bus: Bus,
        kind: type[M],
        handler: Callable[[Incoming[M]], Awaitable[Message]],
        max_concurrent: int,
        begins_traces: bool,
    ) -> None:
        self._begins_traces = begins_traces
        self._bus = bus
        self._kind = kind
        self._handler = handler
        self._max_concurrent = max_concurrent
        self._hops = bus.metrics.histogram("bus_hop_seconds", kind.SCHEMA)
        self._tasks: set[asyncio.Task[None]] = set()
        self.subscription: Subscription | None = None

    def receive(self, raw: RawMessage) -> None:
        """Hand a request to a task of its own."""
        _observe_hop(self._hops, raw.headers)
        task = asyncio.get_running_loop().create_task(self._answer(raw, len(self._tasks) >= self._max_concurrent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, raw: RawMessage, is_overloaded: bool) -> None:
        tracing, parent = self._bus.tracing, raw.headers.get(TRACE_HEADER)
        name = f"process {self._kind.SCHEMA}"
        hop: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if parent is not None or self._begins_traces:
            hop = tracing.span(name, kind=SpanKind.CONSUMER, parent=parent, attributes=_messaging(raw.subject))
        try:
            with hop:
                if is_overloaded:
                    raise QueueFull("This service is at its limit of concurrent requests. Try again in a moment.")
                message = decode(self._kind, raw.headers, raw.body)
                reply = await self._handler(Incoming(message, raw.subject, raw.headers, raw.reply))
                if raw.reply is not None:
                    await self._bus.publish(raw.reply, reply)
        except NatterjackError as error:
            await self._refuse(raw, error)
        except Exception:
            log.exception("a bug while serving %s", raw.subject)
            await self._refuse(raw, InternalError("An internal error occurred; the service's log has the cause."))

    async def _refuse(self, raw: RawMessage, error: NatterjackError) -> None:
        if raw.reply is None:
            log.warning("refused a message on %s without a reply subject: %s", raw.subject, error.message)
            return
        with contextlib.suppress(NatterjackError):  # the connection is gone: nobody is left to tell
            await self._bus.publish_error(raw.reply, error)

    async def close(self) -> None:
        """Take no more requests and wait for the running ones."""
        if self.subscription is not None:
            await self.subscription.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)


@contextlib.asynccontextmanager
async def open_bus(
    settings: BusSettings, tracing: Tracing, *, name: str, metrics: Metrics | None = None
) -> AsyncIterator[Bus]:
    """Connect to the configured NATS server; raises Unavailable with what to do."""
    from services.runtime.nats_transport import connect_nats  # keeps the in-memory bus free of the nats package

    transport = await connect_nats(bus_url(settings), name=name, timeout_s=settings.connect_timeout_s)
    bus = Bus(transport, Subjects(settings.prefix), tracing, metrics)
    try:
        yield bus
    finally:
        await bus.close()


def bus_url(settings: BusSettings) -> str:
    """Return the server's address: the configured one, or the embedded server's."""
    return settings.url or f"nats://{settings.host}:{settings.port}"


def decode_reply(kind: type[R], raw: RawMessage) -> R:
    """Return the reply in `raw`; raises the coded error when it is one."""
    if ERROR_HEADER in raw.headers:
        raise from_body(ErrorReply.model_validate_json(raw.body).error)
    return decode(kind, raw.headers, raw.body)


def _headers(message: Message) -> dict[str, str]:
    headers = {SCHEMA_HEADER: schema_of(message)}
    if (parent := current_traceparent()) is not None:
        headers[TRACE_HEADER] = parent
    return headers


def _stamped(headers: dict[str, str]) -> dict[str, str]:
    headers[SENT_HEADER] = f"{time.time():.6f}"
    return headers


def _observe_hop(hops: Histogram, headers: Mapping[str, str]) -> None:
    """Clients need not send the time, nor have a clock that goes right."""
    with contextlib.suppress(KeyError, ValueError):
        hops.observe(max(0.0, time.time() - float(headers[SENT_HEADER])))


def _ttl(ttl_s: float | None) -> dict[str, str]:
    """The server takes whole seconds, at least one."""
    return {} if ttl_s is None else {TTL_HEADER: f"{max(1, round(ttl_s))}s"}


def _header_text(text: str) -> str:
    """Headers hold one line of ASCII."""
    return text.encode("ascii", "replace").decode().replace("\n", " ")[:512]


def _messaging(subject: str) -> dict[str, str | int | float | bool]:
    return {"messaging.system": "nats", "messaging.destination.name": subject}


def _kv_subject(bucket: str, key: str) -> str:
    return f"{KV_SUBJECT_PREFIX}{bucket}.{key}"


def _stored(kind: type[M], found: StoredMessage) -> Stored[M]:
    return Stored(decode(kind, found.headers, found.body), found.subject, found.sequence)


def _delivered(kind: type[M], raw: RawDelivery) -> Delivery[M]:
    try:
        return Delivery(decode(kind, raw.headers, raw.body), None, raw.headers, raw)
    except NatterjackError as error:
        return Delivery(None, error, raw.headers, raw)
