"""A very small HTTP server for orchestrators and Prometheus: one GET, one page, and the connection ends.

Owns the port that `telemetry.metrics_port` names, and nothing of what the pages say: their functions come from outside.
A web framework would cost a small service more memory and a longer start than everything else that it does.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 64
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """What one path answers."""

    body: bytes
    status: int = 200
    content_type: str = TEXT

    @classmethod
    def of(cls, body: bytes, content_type: str) -> "Page":
        """Return a page that is there, of some type."""
        return cls(body, content_type=content_type)


Pages = Mapping[str, Callable[[str], Page]]
"""By path; each is given the request's `Accept` header."""


@contextlib.asynccontextmanager
async def probe_server(host: str, port: int, pages: Pages) -> AsyncIterator[int]:
    """Serve `pages` by path until the block ends, and yield the port; raises OSError when it is taken."""
    open_ones: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        try:
            if len(open_ones) <= MAX_CONNECTIONS:
                await _answer(reader, writer, pages)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a probe was not answered: %s", type(error).__name__)
        finally:
            open_ones.discard(writer)
            writer.close()

    server = await asyncio.start_server(connected, host, port, limit=MAX_HEAD_BYTES)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in list(open_ones):
            writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Pages) -> None:
    async with asyncio.timeout(READ_TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        page = _page(method, path, _header(rest, b"accept"), pages)
        writer.write(
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n".encode()
        )
        writer.write(b"" if method == b"HEAD" else page.body)
        await writer.drain()


def _header(head: bytes, name: bytes) -> str:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""


def _page(method: bytes, path: str, accept: str, pages: Pages) -> Page:
    if method not in (b"GET", b"HEAD"):
        return Page(b"Only GET is served here.\n", 405)
    if (make := pages.get(path)) is None:
        return Page(f"Here are only {', '.join(sorted(pages))}.\n".encode(), 404)
    try:
        return make(accept)
    except Exception:  # an edge: a bug in a gauge must not take the health check with it
        log.exception("a bug while answering %s", path)
        return Page(b"An internal error occurred; the log has the cause.\n", 500)
