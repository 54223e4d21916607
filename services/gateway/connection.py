"""One client's connection while its answer is made: its body, its going away, and what is written to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Send

from schemas.errors import PayloadTooLarge
from services.gateway.events import KEEP_ALIVE

BODY_TIMEOUT_S = 60.0
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Return the body; raise PayloadTooLarge as soon as that is known, HTTPException 415 or 408, ClientGone.

    Only application/json is taken, so that a web page cannot send a request without its browser asking us first.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "The content type must be application/json.")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request.receive, max_bytes)
    except TimeoutError:
        raise HTTPException(408, f"The request body did not arrive within {BODY_TIMEOUT_S:g} s.") from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {max_bytes} bytes (gateway.max_body_bytes).")


class Client:
    """Whether the client is still there."""

    def __init__(self) -> None:
        self.is_gone = False

    def check(self) -> None:
        """Raise ClientGone once the client has left.

        To be called after each wait: a cancellation is lost in Python 3.11's `asyncio.wait_for` when what it waits for
        arrives in the same turn of the loop.
        """
        if self.is_gone:
            raise ClientGone


@contextlib.asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[Client]:
    """Run the block; cancel it when the client goes away, and raise ClientGone.

    The request's body must have been read: what comes next on the connection is its end.
    """
    client = Client()
    try:
        async with asyncio.timeout(None) as scope, alongside(_expire_at_disconnect(receive, client, scope)):
            yield client
    except TimeoutError:
        client.check()
        raise


async def _expire_at_disconnect(receive: Receive, client: Client, scope: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.is_gone = True
    scope.reschedule(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def alongside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` in a task while the block runs, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class EventWriter:
    """The response of one stream. The status is sent with the first bytes: until then an error can have its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = asyncio.Lock()
        self._last_sent = asyncio.get_running_loop().time()
        self.has_begun = False

    async def write(self, events: bytes, *, is_last: bool = False) -> None:
        """Send events; waits while the client reads more slowly than we write."""
        async with self._sending:
            if not self.has_begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
            self._last_sent = asyncio.get_running_loop().time()

    async def keep_alive(self, period_s: float, sign: Callable[[], bytes] = lambda: KEEP_ALIVE) -> None:
        """Send a sign of life whenever nothing was sent for `period_s`."""
        loop = asyncio.get_running_loop()
        while True:
            remaining_s = self._last_sent + period_s - loop.time()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s)
            elif self._sending.locked():  # a slow client: it has unread bytes already
                await asyncio.sleep(period_s)
            else:
                await self.write(sign())
