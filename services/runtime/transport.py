"""What the bus needs from a message system, in bytes: core messages, streams with compare-and-set, pull consumers.

Two implementations keep one behaviour suite: `nats_transport` and `memory_transport`. This file holds their common
vocabulary and knows neither.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from schemas.errors import Unavailable

MESSAGE_ID_HEADER = "Nats-Msg-Id"
EXPECTED_LAST_HEADER = "Nats-Expected-Last-Subject-Sequence"
TTL_HEADER = "Nats-TTL"
SEQUENCE_HEADER = "Nats-Sequence"
PREVIOUS_SEQUENCE_HEADER = "Nats-Last-Sequence"

HEADER_OVERHEAD_BYTES = 16
"""What the protocol adds to the headers themselves: `NATS/1.0` and the line ends around it."""


class NoResponders(Unavailable):
    """Nobody listens on the subject of a request."""


class NoAnswer(Unavailable):
    """A request was sent, and no answer came in time: it may have been served all the same."""


class NoStream(Unavailable):
    """The stream or bucket does not exist: no service of this deployment has started yet."""


def payload_size(body: bytes, headers: Mapping[str, str]) -> int:
    """Return the size in bytes that counts against `max_payload`: body and headers together."""
    return len(body) + HEADER_OVERHEAD_BYTES + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())


@dataclass(frozen=True, slots=True)
class RawMessage:
    """One message as it came."""

    subject: str
    headers: Mapping[str, str]
    body: bytes
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a stream, with its stream sequence number."""

    subject: str
    headers: Mapping[str, str]
    body: bytes
    sequence: int


@dataclass(frozen=True, slots=True)
class RawDelivery:
    """One message handed out by a consumer; `token` is what the transport needs to acknowledge it."""

    subject: str
    headers: Mapping[str, str]
    body: bytes
    num_delivered: int
    token: str


@dataclass(frozen=True, slots=True)
class Appended:
    """A stored message's sequence number; `duplicate` when its message id was stored before."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream and its limits: every stream has some, or it fills the disk.

    `max_bytes` and `max_msgs` 0 mean unlimited. `work_queue` streams forget acknowledged messages and refuse new ones
    at the limit; others forget their oldest. `republish` maps the subject wildcard to a live one.
    """

    name: str
    subjects: Sequence[str]
    max_age_s: float = 0.0
    max_bytes: int = 0
    max_msgs: int = 0
    max_msgs_per_subject: int = 0
    work_queue: bool = False
    in_memory: bool = False
    message_ttl: bool = False
    republish: tuple[str, str] | None = None
    duplicate_window_s: float = 120.0


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """How full a stream is; limits of 0 mean unlimited."""

    num_messages: int
    num_bytes: int
    max_messages: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acknowledgement."""

    stream: str
    name: str
    subject: str
    ack_wait_s: float
    max_ack_pending: int = 0


AckKind = Literal["ack", "progress", "retry", "terminate"]
MessageCallback = Callable[[RawMessage], None]


class Subscription(Protocol):
    """A live subscription."""

    async def close(self) -> None:
        """Stop receiving; messages in flight may be dropped."""


@dataclass(slots=True)
class ConnectionState:
    """What a transport tells about its connection; `problems` are for a person, newest last."""

    is_connected: bool = True
    num_reconnects: int = 0
    problems: list[str] = field(default_factory=list)


class Transport(Protocol):
    """One connection to a message system. Every wait has a deadline; failures are errors of `schemas.errors`."""

    @property
    def max_payload(self) -> int: ...

    @property
    def state(self) -> ConnectionState: ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each reconnection."""

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses."""

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], reply: str | None = None) -> None:
        """Send at most once; raises PayloadTooLarge, Unavailable."""

    async def request(self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> RawMessage:
        """Send and wait for one reply; raises Unavailable when nobody is there or nobody answers in time."""

    async def subscribe(self, subject: str, callback: MessageCallback, queue: str | None = None) -> Subscription:
        """Call `callback` for every message, one after another; it must only hand off."""

    async def flush(self) -> None:
        """Wait until the server has processed everything sent so far."""

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the stream, or bring an existing one to `spec`."""

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create the consumer, or bring an existing one to `spec`."""

    async def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer that may not be there; what it has handed out is handed out again by others."""

    async def append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> Appended:
        """Store one message; raises Conflict when the expected last sequence is another, QueueFull at a limit."""

    async def fetch(self, stream: str, consumer: str, batch: int, timeout_s: float) -> list[RawDelivery]:
        """Return 1 to `batch` messages as soon as there are any, or none after `timeout_s` at most: ask again."""

    async def withdraw(self, stream: str, consumer: str) -> None:
        """Fetch no more: whatever is given back from now on goes to others. A later fetch begins anew."""

    async def settle(self, delivery: RawDelivery, kind: AckKind) -> None:
        """Acknowledge, prolong, give back or drop a delivery."""

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the newest message of one subject."""

    async def read(self, stream: str, subject: str, after: int) -> list[StoredMessage]:
        """Return one subject's messages with a sequence above `after`, oldest first."""

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        """Return the message of one sequence number, None when the stream has it no more."""

    async def last_of_each(self, stream: str, wildcard: str) -> list[StoredMessage]:
        """Return the newest message of every subject that matches."""

    async def num_messages(self, stream: str) -> int:
        """Return how many messages the stream holds."""

    async def usage(self, stream: str) -> StreamUsage:
        """Return how full the stream is; raises NoStream, Unavailable."""

    async def close(self) -> None:
        """Flush and disconnect."""
