"""uvicorn inside the common life of services: the port first, then connections; no signals and no logs of its own."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.runtime.service import StartFailed

BACKLOG = 128


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The lifecycle owns the signals."""
        yield


class HttpServer:
    """Serves one application from `start` to `stop`."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_stopping(self) -> bool:
        """Tell whether streams should end."""
        return self._server.should_exit

    async def start(self, host: str, port: int) -> str:
        """Take the port and return the URL once connections are accepted; raises StartFailed."""
        listener = _listener(host, port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise StartFailed("The HTTP server ended at its start.")
            await asyncio.sleep(0.005)
        bound_host, bound_port = listener.getsockname()[:2]
        return f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"

    async def wait(self) -> None:
        """Return never; raises when the server ends by itself."""
        if self._serving is not None:
            await asyncio.shield(self._serving)
        raise StartFailed("The HTTP server ended unexpectedly.")

    async def stop(self) -> None:
        """Close everything that is open."""
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=2.0)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartFailed(
            f"Cannot serve the console on {host} port {port}: {error.strerror or error}. "
            "Stop what uses it, or choose another with --set console.port=PORT (0: any free one)."
        ) from None
