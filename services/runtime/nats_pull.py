"""Pulling from one consumer on NATS, one pull request after another. An edge module.

The client's own `fetch` lets pull requests overlap: it gives up by its own clock, a moment before the server does, and
takes a message that an older request brought for the first of the newer one's. Then it waits for the rest until the
end, with the message in its hand. Here every request has a reply subject of its own, and only its own end ends it.
"""

import asyncio
import itertools
from collections import deque

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.errors import APIError

from services.runtime.nats_wire import ACK_BODIES, NO_MESSAGES, REQUEST_TIMEOUT

STATUS_HEADER = "Status"
GRACE_S = 0.5
"""The server ends a pull request by its own clock; whoever stopped earlier would leave it open behind."""


class Pull:
    """The way from one consumer; what comes late for one `fetch` is returned by the next."""

    def __init__(self, client: Client, stream: str, consumer: str) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = client.new_inbox()
        self._numbers = itertools.count(1)
        self._request = ""
        self._arrived: deque[Msg] = deque()
        self._end: Msg | None = None
        self._news = asyncio.Event()
        self._subscription: Subscription | None = None
        self._turn = asyncio.Lock()

    async def fetch(self, batch: int, timeout_s: float) -> list[Msg]:
        """Return what is there, up to `batch` messages; if nothing is, the first that comes within `timeout_s`.

        Raises APIError with what the server says against it, the client's errors.
        """
        async with self._turn:
            if self._subscription is None:
                self._subscription = await self._client.subscribe(f"{self._inbox}.>", cb=self._hear)
            if not self._arrived:
                await self._ask({"batch": batch, "no_wait": True}, batch, timeout_s)
            if not self._arrived and self._end is not None:
                await self._ask({"batch": 1, "expires": round(timeout_s * 1e9)}, 1, timeout_s)
            return [self._arrived.popleft() for _ in range(min(batch, len(self._arrived)))]

    async def _ask(self, options: dict[str, object], batch: int, timeout_s: float) -> None:
        """Send one pull request and wait for its end: the last of its messages, or the server's word."""
        self._request, self._end = f"{self._inbox}.pull.{next(self._numbers)}", None
        await self._client.publish(self._subject, orjson.dumps(options), self._request)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                while self._end is None and len(self._arrived) < batch:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:  # the server has forgotten the request, or its word is lost
            return
        status = self._end.headers[STATUS_HEADER] if self._end is not None and self._end.headers is not None else None
        if self._end is not None and status not in (NO_MESSAGES, REQUEST_TIMEOUT):
            raise APIError.from_msg(self._end)

    async def _hear(self, message: Msg) -> None:
        if message.headers is None or STATUS_HEADER not in message.headers:
            self._arrived.append(message)
        elif message.subject == self._request and message.headers[STATUS_HEADER] != api.StatusCode.CONTROL_MESSAGE:
            self._end = message
        self._news.set()

    async def close(self) -> None:
        """Pull no more, and give back what nobody took. Raises the client's errors."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()
        while self._arrived:
            await self._client.publish(self._arrived.popleft().reply, ACK_BODIES["retry"])
