"""The bus in memory: the same interface and behaviour as NATS, for tests and simulations within one process.

`MemoryServer` stands for the server; each `MemoryTransport` is one connection to it. Time is a parameter, so that tests
can let acknowledgements and time-to-live expire at will.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from schemas.errors import Conflict, PayloadTooLarge, QueueFull, Unavailable
from services.runtime.transport import (
    EXPECTED_LAST_HEADER,
    MESSAGE_ID_HEADER,
    PREVIOUS_SEQUENCE_HEADER,
    SEQUENCE_HEADER,
    TTL_HEADER,
    AckKind,
    Appended,
    ConnectionState,
    ConsumerSpec,
    MessageCallback,
    NoAnswer,
    NoResponders,
    NoStream,
    RawDelivery,
    RawMessage,
    StoredMessage,
    StreamSpec,
    StreamUsage,
    Subscription,
    payload_size,
)

Clock = Callable[[], float]


def matches(pattern: str, subject: str) -> bool:
    """Tell whether a NATS wildcard pattern covers `subject`."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


@dataclass(slots=True)
class _Entry:
    message: StoredMessage
    stored_at: float
    expires_at: float | None
    message_id: str | None


@dataclass(slots=True)
class _Consumer:
    spec: ConsumerSpec
    pending: dict[int, float] = field(default_factory=dict)
    num_delivered: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    spec: StreamSpec
    entries: dict[int, _Entry] = field(default_factory=dict)
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    next_sequence: int = 1
    message_ids: dict[str, tuple[int, float]] = field(default_factory=dict)

    def expire(self, now: float) -> None:
        age = self.spec.max_age_s
        for sequence, entry in list(self.entries.items()):
            too_old = age > 0 and entry.stored_at + age <= now
            if too_old or (entry.expires_at is not None and entry.expires_at <= now):
                self.remove(sequence)
        window = self.spec.duplicate_window_s
        self.message_ids = {key: value for key, value in self.message_ids.items() if value[1] + window > now}

    def remove(self, sequence: int) -> None:
        self.entries.pop(sequence, None)
        for consumer in self.consumers.values():
            consumer.pending.pop(sequence, None)
            consumer.num_delivered.pop(sequence, None)

    def of_subject(self, pattern: str) -> list[StoredMessage]:
        return [e.message for e in self.entries.values() if matches(pattern, e.message.subject)]

    def is_over(self, num_more: int = 0, bytes_more: int = 0) -> bool:
        spec, used = self.spec, self.num_bytes
        return (0 < spec.max_msgs < len(self.entries) + num_more) or (0 < spec.max_bytes < used + bytes_more)

    @property
    def num_bytes(self) -> int:
        return sum(len(entry.message.body) for entry in self.entries.values())


@dataclass(slots=True)
class _Listener:
    server: "MemoryServer"
    pattern: str
    callback: MessageCallback
    queue: str | None

    async def close(self) -> None:
        if self in self.server.listeners:
            self.server.listeners.remove(self)


class MemoryServer:
    """Routes messages and holds streams; shared by all connections of a test."""

    def __init__(self, *, clock: Clock = time.monotonic, max_payload: int = 1024 * 1024) -> None:
        self.clock = clock
        self.max_payload = max_payload
        self.listeners: list[_Listener] = []
        self.streams: dict[str, _Stream] = {}
        self.arrived = asyncio.Event()
        self._turn = itertools.count()
        self._ids = itertools.count(1)

    def connect(self) -> "MemoryTransport":
        """Return a new connection."""
        return MemoryTransport(self)

    def next_id(self) -> int:
        """Return a number that was not returned before."""
        return next(self._ids)

    def deliver(self, message: RawMessage) -> int:
        """Hand `message` to every listener, and to one of each queue group; return how many got it."""
        groups: dict[str, list[_Listener]] = {}
        chosen = []
        for listener in self.listeners:
            if matches(listener.pattern, message.subject):
                if listener.queue is None:
                    chosen.append(listener)
                else:
                    groups.setdefault(listener.queue, []).append(listener)
        chosen += [members[next(self._turn) % len(members)] for members in groups.values()]
        loop = asyncio.get_running_loop()
        for listener in chosen:
            loop.call_soon(listener.callback, message)
        return len(chosen)

    def stream_for(self, subject: str) -> _Stream | None:
        """Return the stream that stores `subject`."""
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                stream.expire(self.clock())
                return stream
        return None

    def stream(self, name: str) -> _Stream:
        """Return a stream by name; raises Unavailable."""
        if name not in self.streams:
            raise NoStream(f"The stream {name} does not exist.")
        stream = self.streams[name]
        stream.expire(self.clock())
        return stream

    def store(self, stream: _Stream, subject: str, body: bytes, headers: Mapping[str, str]) -> Appended:
        """Append to a stream as JetStream does: duplicates, compare-and-set, limits, republish."""
        message_id = headers.get(MESSAGE_ID_HEADER)
        if message_id is not None and message_id in stream.message_ids:
            return Appended(stream.message_ids[message_id][0], duplicate=True)
        previous = max((m.sequence for m in stream.of_subject(subject)), default=0)
        expected = headers.get(EXPECTED_LAST_HEADER)
        if expected is not None and int(expected) != previous:
            raise Conflict(f"Expected last sequence {expected} of {subject}, found {previous}.")
        if stream.spec.work_queue and stream.is_over(1, len(body)):
            raise QueueFull("The work queue is full.")
        return Appended(self._insert(stream, subject, body, headers, previous))

    def _insert(self, stream: _Stream, subject: str, body: bytes, headers: Mapping[str, str], previous: int) -> int:
        now, sequence = self.clock(), stream.next_sequence
        stream.next_sequence += 1
        ttl = headers.get(TTL_HEADER)
        expires = now + float(ttl.removesuffix("s")) if ttl is not None else None
        message_id = headers.get(MESSAGE_ID_HEADER)
        message = StoredMessage(subject, dict(headers), body, sequence)
        stream.entries[sequence] = _Entry(message, now, expires, message_id)
        if message_id is not None:
            stream.message_ids[message_id] = (sequence, now)
        self._trim(stream, subject)
        if stream.spec.republish is not None:
            source, target = (pattern.removesuffix(">") for pattern in stream.spec.republish)
            extra = {SEQUENCE_HEADER: str(sequence), PREVIOUS_SEQUENCE_HEADER: str(previous)}
            self.deliver(RawMessage(target + subject.removeprefix(source), {**headers, **extra}, body))
        self.arrived.set()
        return sequence

    def _trim(self, stream: _Stream, subject: str) -> None:
        limit = stream.spec.max_msgs_per_subject
        if limit:
            for message in stream.of_subject(subject)[:-limit]:
                stream.remove(message.sequence)
        while not stream.spec.work_queue and stream.is_over():
            stream.remove(next(iter(stream.entries)))


class MemoryTransport:
    """One connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._state = ConnectionState()

    @property
    def max_payload(self) -> int:
        return self._server.max_payload

    @property
    def state(self) -> ConnectionState:
        return self._state

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Memory never disconnects."""

    def new_inbox(self) -> str:
        return f"_INBOX.{self._server.next_id()}"

    def _check(self, body: bytes, headers: Mapping[str, str]) -> None:
        if not self._state.is_connected:
            raise Unavailable("The connection is closed.")
        size = payload_size(body, headers)
        if size > self._server.max_payload:
            raise PayloadTooLarge(f"The message has {size} bytes; the bus takes {self._server.max_payload}.")

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], reply: str | None = None) -> None:
        self._check(body, headers)
        self._server.deliver(RawMessage(subject, dict(headers), body, reply))
        stream = self._server.stream_for(subject)
        if stream is not None:
            self._server.store(stream, subject, body, headers)

    async def request(self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> RawMessage:
        self._check(body, headers)
        answer: asyncio.Future[RawMessage] = asyncio.get_running_loop().create_future()
        inbox = self.new_inbox()

        def resolve(message: RawMessage) -> None:
            if not answer.done():
                answer.set_result(message)

        subscription = await self.subscribe(inbox, resolve)
        try:
            if self._server.deliver(RawMessage(subject, dict(headers), body, inbox)) == 0:
                raise NoResponders(f"Nobody serves {subject}.")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"No answer on {subject} within {timeout_s:g} s.") from None
        finally:
            await subscription.close()

    async def subscribe(self, subject: str, callback: MessageCallback, queue: str | None = None) -> Subscription:
        listener = _Listener(self._server, subject, callback, queue)
        self._server.listeners.append(listener)
        return listener

    async def flush(self) -> None:
        await asyncio.sleep(0)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        existing = self._server.streams.get(spec.name)
        if existing is None:
            self._server.streams[spec.name] = _Stream(spec)
        else:
            existing.spec = spec

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        consumers = self._server.stream(spec.stream).consumers
        if spec.name in consumers:
            consumers[spec.name].spec = spec
        else:
            consumers[spec.name] = _Consumer(spec)

    async def drop_consumer(self, stream: str, name: str) -> None:
        self._server.stream(stream).consumers.pop(name, None)

    async def append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> Appended:
        self._check(body, headers)
        stream = self._server.stream_for(subject)
        if stream is None:
            raise Unavailable(f"No stream stores {subject}.")
        self._server.deliver(RawMessage(subject, dict(headers), body))
        return self._server.store(stream, subject, body, headers)

    async def fetch(self, stream: str, consumer: str, batch: int, timeout_s: float) -> list[RawDelivery]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._server.arrived.clear()
            taken = self._take(stream, consumer, batch)
            remaining = deadline - time.monotonic()
            if taken or remaining <= 0:
                return taken
            try:
                async with asyncio.timeout(min(remaining, 0.05)):
                    await self._server.arrived.wait()
            except TimeoutError:
                continue

    def _take(self, stream: str, consumer: str, batch: int) -> list[RawDelivery]:
        source = self._server.stream(stream)
        if consumer not in source.consumers:
            raise Unavailable(f"The consumer {consumer} of {stream} does not exist.")
        state, now = source.consumers[consumer], self._server.clock()
        taken: list[RawDelivery] = []
        for sequence, entry in source.entries.items():
            due = state.pending.get(sequence, 0.0) <= now
            if len(taken) < batch and due and matches(state.spec.subject, entry.message.subject):
                state.pending[sequence] = now + state.spec.ack_wait_s
                count = state.num_delivered[sequence] = state.num_delivered.get(sequence, 0) + 1
                token = f"{stream} {consumer} {sequence}"
                message = entry.message
                taken.append(RawDelivery(message.subject, message.headers, message.body, count, token))
        return taken

    async def withdraw(self, stream: str, consumer: str) -> None:
        """A fetch that has ended takes nothing."""

    async def settle(self, delivery: RawDelivery, kind: AckKind) -> None:
        name, consumer, number = delivery.token.split()
        stream = self._server.stream(name)
        state, sequence = stream.consumers[consumer], int(number)
        if kind in ("ack", "terminate"):
            stream.remove(sequence)
        elif sequence in stream.entries:
            now = self._server.clock()
            state.pending[sequence] = now + state.spec.ack_wait_s if kind == "progress" else now
            self._server.arrived.set()

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        found = self._server.stream(stream).of_subject(subject)
        return found[-1] if found else None

    async def read(self, stream: str, subject: str, after: int) -> list[StoredMessage]:
        return [m for m in self._server.stream(stream).of_subject(subject) if m.sequence > after]

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        entry = self._server.stream(stream).entries.get(sequence)
        return None if entry is None else entry.message

    async def last_of_each(self, stream: str, wildcard: str) -> list[StoredMessage]:
        newest = {message.subject: message for message in self._server.stream(stream).of_subject(wildcard)}
        return list(newest.values())

    async def num_messages(self, stream: str) -> int:
        return (await self.usage(stream)).num_messages

    async def usage(self, stream: str) -> StreamUsage:
        found = self._server.stream(stream)
        return StreamUsage(len(found.entries), found.num_bytes, found.spec.max_msgs, found.spec.max_bytes)

    async def close(self) -> None:
        self._state.is_connected = False
