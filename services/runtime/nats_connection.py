"""One connection to a nats-server that looks after itself: it never gives up, notices a dead one, and says so.

Guards the traps of the client: callbacks never raise (the read loop would die), reconnection never ends, and a watchdog
forces one when a connection that calls itself connected no longer answers a ping. Knows no streams and no subjects.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from services.runtime.nats_requests import Requests
from services.runtime.transport import ConnectionState

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PROBLEMS = 20
WATCHDOG_PERIOD_S = 5.0
PING_INTERVAL_S = 10
RECONNECT_WAIT_S: Any = 0.5
"""Any: the client takes fractions of a second, although it is annotated otherwise."""
ASCII_SPACE = " \t\n\r\x0b\x0c"


class QuickClient(Client):
    """The client, reading headers in a third of the time: that was a fifth of the work of taking a message."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Return the headers; names that are not one word of ASCII are left out, as the client does."""
        headers: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, separator, value = line.partition(":")
            if separator and name.isascii() and len(name.split()) == 1:
                headers[name.strip()] = value.strip(ASCII_SPACE)
        return headers


class NatsConnection:
    """The client and its health; `restore` is awaited after each reconnection, before anybody is told of it."""

    def __init__(self, restore: Callable[[], Awaitable[None]]) -> None:
        self.client = QuickClient()
        self.requests = Requests(self.client)
        self.state = ConnectionState(is_connected=False)
        self._restore = restore
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._watchdog: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[Any]] = set()

    async def open(self, url: str, name: str) -> None:
        """Connect once; afterwards the client reconnects by itself for ever."""
        await self.client.connect(
            servers=url,
            name=name,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,
            connect_timeout=2,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            drain_timeout=5,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_disconnect,
        )
        self.state.is_connected = True
        self._watchdog = asyncio.create_task(self._watch(), name="nats-watchdog")

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the connection is there again."""
        self._reconnect_callbacks.append(callback)

    async def _on_error(self, error: Exception) -> None:
        """Note the problem; must never raise, or the client's read loop dies."""
        self.state.problems.append(f"{type(error).__name__}: {error}"[:300])
        del self.state.problems[:-MAX_PROBLEMS]
        log.warning("nats: %s: %s", type(error).__name__, error)

    async def _on_disconnect(self) -> None:
        """An answer on its way is lost with the connection: nobody needs to wait for it any longer."""
        self.state.is_connected = False
        self.requests.cut_off()
        for asking in list(self._asking):
            asking.cancel()

    async def _on_reconnect(self) -> None:
        self.state.is_connected = True
        self.state.num_reconnects += 1
        log.info("nats: reconnected")
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._come_back(), name="nats-restore")

    async def _come_back(self) -> None:
        await self._restore()
        for callback in self._reconnect_callbacks:
            try:
                callback()
            except Exception:
                log.exception("a reconnect callback failed")

    async def _watch(self) -> None:
        """A dead read loop leaves `is_connected` true: only a ping that comes back proves the connection."""
        while True:
            await asyncio.sleep(WATCHDOG_PERIOD_S)
            if not self.client.is_connected:
                continue
            try:
                await self.client.rtt(timeout=max(1, int(WATCHDOG_PERIOD_S)))  # flush() sends no ping then
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.warning("nats: no answer to a ping (%s), reconnecting", type(error).__name__)
                await self._reconnect()

    async def _reconnect(self) -> None:
        try:
            await self.client.force_reconnect()
        except (nats.errors.Error, OSError) as error:
            log.warning("nats: reconnection failed: %s", type(error).__name__)

    async def unless_cut_off(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call of the client in a task of its own; raises TimeoutError when the connection is lost."""
        asking = asyncio.get_running_loop().create_task(call)
        self._asking.add(asking)
        try:
            await asyncio.wait({asking})
        finally:
            self._asking.discard(asking)
            if not asking.done():
                asking.cancel()
        if asking.cancelled():
            raise TimeoutError
        return asking.result()

    async def written(self, timeout_s: float) -> None:
        """Let the client write what it holds: the ping of its flush overtakes that, and alone would prove nothing."""
        async with asyncio.timeout(timeout_s):
            while self.client.is_connected and self.client.pending_data_size:  # noqa: ASYNC110 (the client has no event)
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Write what is pending, and end; harmless when it was never open."""
        if self.client.is_connected:
            try:
                await self.client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.debug("flush while closing: %s", type(error).__name__)
        for task in (self._watchdog, self._restoring):  # after the flush: a cancelled ping breaks the client's reading
            if task is not None:
                task.cancel()
        self._watchdog = None
        try:
            await self.client.close()
        except (nats.errors.Error, OSError, AssertionError) as error:  # asserts that it had begun to connect
            log.debug("close: %s", type(error).__name__)
