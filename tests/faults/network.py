"""A TCP proxy that stands for the network between one service and the broker, and can be cut.

A cut network holds everything back, as a lost route does: nothing is closed, and what was sent comes late.
"""

import asyncio
import contextlib

READ_BYTES = 1 << 16


class Network:
    """Forwards connections on a port of its own to the broker's port."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Hold everything back from now on."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Let everything through again, what was held back first."""
        self._is_whole.set()

    async def close(self) -> None:
        """End every connection."""
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_whole.wait()
        try:
            remote_reader, remote_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, remote_writer), (remote_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(READ_BYTES):
                await self._is_whole.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
