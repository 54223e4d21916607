"""One HTTP/1.1 connection for one request after another, made for low cost: a parser in C, and no task per message.

Knows nothing of what is asked; the body of an answer goes to a callback as it comes.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
DEFAULT_PORTS = {"http": 80, "https": 443}


class ConnectionLost(Exception):
    """The server closed the connection before the answer was complete, or sent what is no HTTP."""


class HttpConnection(asyncio.Protocol):
    """The protocol of one connection; `open_connection` makes one."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._on_body: Callable[[bytes], None] = lambda data: None
        self._done: asyncio.Future[int] | None = None
        self._status = 0
        self._keeps_alive = False

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._keeps_alive and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, head: bytes, body: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a request, call `on_body` with each part of the answer, and return its status; raises ConnectionLost."""
        if self._transport is None:
            raise ConnectionLost("The connection was closed.")
        self._parser = cast(Any, httptools).HttpResponseParser(self)
        self._on_body, self._status, self._keeps_alive = on_body, 0, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        return await self._done

    def close(self) -> None:
        """Close it, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"The server sent no HTTP: {error}.")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("The server closed the connection in the middle of an answer.")

    def _fail(self, text: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLost(text))

    # ---- called by the parser

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._on_body(body)

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)


class ConnectionPool:
    """The connections to one server: idle ones are used again, new ones are opened as needed."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._parts: SplitResult = urlsplit(url)
        self._ssl = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._headers = dict(headers)
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()

    async def exchange(self, method: str, path: str, body: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send one request over a connection of its own; see `HttpConnection.exchange`. Raises OSError too."""
        connection = await self._take()
        try:
            status = await connection.exchange(self._head(method, path, len(body)), body, on_body)
        except BaseException:
            self._all.discard(connection)
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            self._all.discard(connection)
            connection.close()
        return status

    def close(self) -> None:
        """Close every connection."""
        for connection in self._all:
            connection.close()

    async def _take(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            self._all.discard(connection)
        host, port = self._parts.hostname or "", self._parts.port or DEFAULT_PORTS.get(self._parts.scheme, 80)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                HttpConnection, host, port, ssl=self._ssl
            )
        self._all.add(connection)
        return connection

    def _head(self, method: str, path: str, num_bytes: int) -> bytes:
        lines = [
            f"{method} {self._parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {self._parts.netloc.rpartition('@')[2]}",
        ]
        fields = {"Content-Type": "application/json", "Content-Length": str(num_bytes), **self._headers}
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
