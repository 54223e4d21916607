"""The bus on NATS: with `nats_connection` and `nats_wire`, the only module that imports the `nats` package.

Sizes are checked against `max_payload` with their headers (the server would cut the connection), and what waits for an
answer does not outlive the connection that would bring it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext, api

from schemas.errors import NatterjackError, PayloadTooLarge, Unavailable
from services.runtime.nats_connection import RECONNECT_WAIT_S, NatsConnection
from services.runtime.nats_pull import Pull
from services.runtime.nats_wire import (
    ACK_BODIES,
    END_OF_BATCH,
    NO_MESSAGES,
    NO_RESPONDERS,
    append_error,
    read_error,
    stream_config,
    stream_error,
    to_delivery,
    to_raw,
    to_stored,
)
from services.runtime.transport import (
    AckKind,
    Appended,
    ConnectionState,
    ConsumerSpec,
    MessageCallback,
    NoAnswer,
    NoResponders,
    RawDelivery,
    RawMessage,
    StoredMessage,
    StreamSpec,
    StreamUsage,
    Subscription,
    payload_size,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

JETSTREAM_TIMEOUT_S = 2.5
"""Also how long an append hangs whose answer a restarting server took along."""
STORES_NOTHING = (
    " The NATS server is there, but did not store the message. If its disk was full, make room and restart it: "
    "it does not write to a stream again by itself."
)
RESTORE_ATTEMPTS = 20
MAX_FETCH_S = 5.0
"""A pull request that the server has forgotten (it restarted) is noticed by its own end only."""
READ_BATCH = 512
READ_BYTES = 8 << 20
"""Limits of one page: the server cuts a connection that cannot take what it has to send (64 MiB)."""


async def connect_nats(url: str, *, name: str, timeout_s: float) -> "NatsTransport":
    """Connect and check that JetStream is there; the client itself retries, for at most `timeout_s`.

    Raises Unavailable with what to do.
    """
    transport = NatsTransport()
    try:
        async with asyncio.timeout(timeout_s):
            await transport.open(url, name)
            await transport.check_jetstream()
    except (OSError, ValueError, nats.errors.Error, TimeoutError) as error:
        cause = (*transport.state.problems, type(error).__name__)[0]
        await transport.close()
        raise Unavailable(
            f"Cannot reach NATS at {without_password(url)}: {cause}. Start a nats-server with "
            "JetStream there, set bus.url, or run `natterjack up`, which brings its own."
        ) from None
    return transport


def without_password(url: str) -> str:
    """Return the URL as it may be shown: credentials replaced."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else url


@dataclass(slots=True)
class _Subscription:
    inner: NatsSubscription

    async def close(self) -> None:
        try:
            await self.inner.unsubscribe()
        except nats.errors.Error as error:
            log.debug("unsubscribe after the connection closed: %s", error)


class NatsTransport:
    """One connection to a nats-server."""

    def __init__(self) -> None:
        self._connection = NatsConnection(self._restore)
        self._client = self._connection.client
        self._js: JetStreamContext = self._client.jetstream(timeout=JETSTREAM_TIMEOUT_S)
        self._pulls: dict[tuple[str, str], Pull] = {}
        self._streams: dict[str, StreamSpec] = {}
        self._consumers: dict[tuple[str, str], ConsumerSpec] = {}

    async def open(self, url: str, name: str) -> None:
        """Connect once; afterwards the client reconnects by itself for ever."""
        await self._connection.open(url, name)

    async def check_jetstream(self) -> None:
        """Raise Unavailable when the server has no JetStream."""
        try:
            await self._js.account_info()
        except (nats.js.errors.Error, nats.errors.Error) as error:
            await self.close()
            raise Unavailable(
                f"The NATS server answers, but JetStream does not ({type(error).__name__}). Start it with `-js`, or "
                "enable JetStream for this account."
            ) from None

    # ---- connection state

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    @property
    def state(self) -> ConnectionState:
        return self._connection.state

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._connection.on_reconnect(callback)

    async def _restore(self) -> None:
        """Make the streams and consumers again: a restarted server has lost those in memory, perhaps its store too."""
        for _ in range(RESTORE_ATTEMPTS):
            try:
                for stream in list(self._streams.values()):
                    await self.ensure_stream(stream)
                for consumer in list(self._consumers.values()):
                    await self.ensure_consumer(consumer)
                return
            except NatterjackError as error:
                log.warning("nats: after the reconnection: %s", error.message)
                await asyncio.sleep(RECONNECT_WAIT_S)

    # ---- core messages

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], reply: str | None = None) -> None:
        self._check_size(body, headers)
        try:
            await self._client.publish(subject, body, reply or "", dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"Cannot publish on {subject}: {type(error).__name__}.") from None

    async def request(self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> RawMessage:
        return await self._ask(subject, body, headers, timeout_s, of_server=False)

    async def _ask(
        self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float, *, of_server: bool
    ) -> RawMessage:
        self._check_size(body, headers)
        try:
            answer = await self._connection.requests.ask(subject, body, headers, timeout_s, of_server=of_server)
        except (nats.errors.TimeoutError, TimeoutError):
            raise NoAnswer(f"No answer on {subject} within {timeout_s:g} s.") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"Cannot send on {subject}: {type(error).__name__}.") from None
        if not answer.data and (answer.headers or {}).get("Status") == NO_RESPONDERS:
            raise NoResponders(f"Nobody serves {subject}.")
        return to_raw(answer)

    async def subscribe(self, subject: str, callback: MessageCallback, queue: str | None = None) -> Subscription:
        async def on_message(message: Msg) -> None:
            try:
                callback(to_raw(message))
            except Exception:
                log.exception("a callback on %s failed", subject)

        try:
            return _Subscription(await self._client.subscribe(subject, queue or "", on_message))
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"Cannot subscribe to {subject}: {type(error).__name__}.") from None

    async def flush(self) -> None:
        try:
            await self._connection.written(JETSTREAM_TIMEOUT_S)
            await _cancellable(self._client.flush(timeout=int(JETSTREAM_TIMEOUT_S)))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise Unavailable(f"The NATS server does not answer: {type(error).__name__}.") from None

    def _check_size(self, body: bytes, headers: Mapping[str, str]) -> None:
        size, limit = payload_size(body, headers), self.max_payload
        if size > limit:
            raise PayloadTooLarge(f"The message has {size} bytes with its headers; the bus takes {limit}.")

    # ---- streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        config = stream_config(spec)
        try:
            await self._js.add_stream(config)
        except nats.js.errors.BadRequestError:
            await self._update(spec.name, config)
        except (nats.js.errors.APIError, nats.errors.Error) as error:
            raise stream_error(error, spec.name) from None
        self._streams[spec.name] = spec

    async def _update(self, name: str, config: api.StreamConfig) -> None:
        """Bring an existing stream to `config`; storage and retention cannot change, which the server says."""
        try:
            await self._js.update_stream(config)
        except (nats.js.errors.APIError, nats.errors.Error) as error:
            raise stream_error(error, name) from None

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        config = api.ConsumerConfig(
            durable_name=spec.name,
            filter_subject=spec.subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=spec.ack_wait_s,
            max_ack_pending=spec.max_ack_pending or -1,
            max_deliver=-1,
        )
        try:
            await self._js.add_consumer(spec.stream, config)
        except (nats.js.errors.APIError, nats.errors.Error) as error:
            raise stream_error(error, spec.stream) from None
        self._consumers[spec.stream, spec.name] = spec

    async def drop_consumer(self, stream: str, name: str) -> None:
        self._consumers.pop((stream, name), None)
        try:
            await self._js.delete_consumer(stream, name)
        except nats.js.errors.NotFoundError:
            return
        except (nats.js.errors.APIError, nats.errors.Error) as error:
            raise stream_error(error, stream) from None

    async def append(self, subject: str, body: bytes, headers: Mapping[str, str]) -> Appended:
        try:
            answer = await self._ask(subject, body, headers, JETSTREAM_TIMEOUT_S, of_server=True)
        except NoAnswer as silence:
            raise NoAnswer(f"{silence.message}{STORES_NOTHING if self._client.is_connected else ''}") from None
        ack = orjson.loads(answer.body)
        if (error := ack.get("error")) is not None:
            raise append_error(error, subject)
        return Appended(ack["seq"], bool(ack.get("duplicate")))

    async def fetch(self, stream: str, consumer: str, batch: int, timeout_s: float) -> list[RawDelivery]:
        try:
            pull = self._pulls.setdefault((stream, consumer), Pull(self._client, stream, consumer))
            messages = await self._connection.unless_cut_off(pull.fetch(batch, min(timeout_s, MAX_FETCH_S)))
        except (nats.errors.TimeoutError, TimeoutError):
            return []
        except asyncio.CancelledError:
            await self.withdraw(stream, consumer)
            raise
        except (nats.js.errors.APIError, nats.errors.Error, OSError) as error:
            await self.withdraw(stream, consumer)
            raise stream_error(error, stream) from None
        return [to_delivery(message) for message in messages]

    async def withdraw(self, stream: str, consumer: str) -> None:
        """The server would answer an abandoned pull request all the same, and what it hands out so would be lost."""
        pull = self._pulls.pop((stream, consumer), None)
        try:
            if pull is not None:
                await pull.close()
        except (nats.errors.Error, OSError) as error:
            log.debug("unsubscribe after the connection closed: %s", error)

    async def settle(self, delivery: RawDelivery, kind: AckKind) -> None:
        await self.publish(delivery.token, ACK_BODIES[kind], {})

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        return await self._direct_get(stream, f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        return await self._direct_get(stream, f"$JS.API.DIRECT.GET.{stream}", orjson.dumps({"seq": sequence}))

    async def _direct_get(self, stream: str, request: str, query: bytes) -> StoredMessage | None:
        answer = await self._ask(request, query, {}, JETSTREAM_TIMEOUT_S, of_server=True)
        status = answer.headers.get("Status")
        if status == NO_MESSAGES:
            return None
        if status is not None:
            raise read_error(stream, answer.headers)
        return to_stored(answer)

    async def read(self, stream: str, subject: str, after: int) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        while True:
            start = (found[-1].sequence if found else after) + 1
            query = {"batch": READ_BATCH, "max_bytes": READ_BYTES, "seq": start, "next_by_subj": subject}
            page, num_pending = await self._direct_batch(stream, query)
            found += page
            if not page or num_pending == 0:
                return found

    async def last_of_each(self, stream: str, wildcard: str) -> list[StoredMessage]:
        found, _ = await self._direct_batch(stream, {"multi_last": [wildcard]})
        return found

    async def _direct_batch(self, stream: str, query: dict[str, Any]) -> tuple[list[StoredMessage], int]:
        """Batched direct get (ADR-31): replies come on an inbox until one has an end-of-batch status.

        Returns the messages, and how many more match.
        """
        found: list[StoredMessage] = []
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def collect(message: RawMessage) -> None:
            status = message.headers.get("Status")
            if status is None:
                found.append(to_stored(message))
            elif not end.done():
                if status in (END_OF_BATCH, NO_MESSAGES):
                    end.set_result(int(message.headers.get("Nats-Num-Pending", 0)))
                else:
                    end.set_exception(read_error(stream, message.headers))

        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, collect)
        try:
            await self.publish(f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(query), {}, inbox)
            async with asyncio.timeout(JETSTREAM_TIMEOUT_S):
                num_pending = await end
        except TimeoutError:
            raise Unavailable(f"No answer while reading {stream}.") from None
        finally:
            await subscription.close()
        return found, num_pending

    async def num_messages(self, stream: str) -> int:
        return (await self.usage(stream)).num_messages

    async def usage(self, stream: str) -> StreamUsage:
        try:
            info = await self._js.stream_info(stream)
        except (nats.js.errors.APIError, nats.errors.Error) as error:
            raise stream_error(error, stream) from None
        limits = (max(0, info.config.max_msgs or 0), max(0, info.config.max_bytes or 0))
        return StreamUsage(int(info.state.messages), int(info.state.bytes), *limits)

    async def close(self) -> None:
        await self._connection.close()


async def _cancellable(call: Awaitable[T]) -> T:
    """Await a call of the client so that no cancellation is lost.

    Python 3.11's `asyncio.wait_for`, which the client uses, swallows one that comes together with the result.
    """
    task = asyncio.current_task()
    num_cancellations = task.cancelling() if task is not None else 0
    result = await call
    if task is not None and task.cancelling() > num_cancellations:
        raise asyncio.CancelledError
    return result
