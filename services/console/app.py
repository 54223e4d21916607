"""The console's HTTP application: the page, its files, its events and traces. Knows neither the bus nor uvicorn."""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from services.console.access import Access
from services.console.live import Live
from services.console.trace_ring import TraceRing
from services.console.waterfall import waterfall

STATIC = Path(__file__).with_name("static")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_PAGES = 64
"""Event streams that are open at a time."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, read once."""

    body: bytes
    media_type: str
    etag: str


def load_files(root: Path = STATIC) -> dict[str, StaticFile]:
    """Return every file of the page by its path below `root`: nothing else can be asked for."""
    files: dict[str, StaticFile] = {}
    for path in root.rglob("*"):
        if path.is_file() and path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            files[path.relative_to(root).as_posix()] = StaticFile(body, MEDIA_TYPES[path.suffix], etag)
    return files


class Pages:
    """The routes' functions."""

    def __init__(
        self, traces: TraceRing, live: Live, files: Mapping[str, StaticFile], is_stopping: Callable[[], bool]
    ) -> None:
        self._traces = traces
        self._live = live
        self._files = files
        self._is_stopping = is_stopping
        self._num_open = 0

    async def root(self, request: Request) -> Response:
        """Lead to the page."""
        return RedirectResponse("/console")

    async def page(self, request: Request) -> Response:
        """Return the page."""
        return self._file("index.html", request)

    async def file(self, request: Request) -> Response:
        """Return one of the page's files."""
        return self._file(request.path_params["path"], request)

    def _file(self, path: str, request: Request) -> Response:
        file = self._files.get(path)
        if file is None:
            return PlainTextResponse("There is no such file.\n", 404)
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    async def events(self, request: Request) -> Response:
        """Stream everything, then every second's news, as server-sent events."""
        if self._num_open >= MAX_PAGES:
            return PlainTextResponse("Too many pages are open.\n", 503, {"Retry-After": "10"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        self._num_open += 1
        try:
            async for event in self._live.events(self._is_stopping):
                yield event
        finally:
            self._num_open -= 1

    async def trace(self, request: Request) -> Response:
        """Return one request's waterfall by its id, its answer's or its trace's; 404 when nothing is known of it."""
        name = request.path_params["name"]
        reply = waterfall(self._traces.find(name), name)
        return JSONResponse(reply.model_dump(mode="json"), 200 if reply.rows else 404, {"Cache-Control": "no-store"})

    async def health(self, request: Request) -> Response:
        """Tell that this process lives."""
        return PlainTextResponse("ok\n")


def build_app(pages: Pages, keys: tuple[str, ...]) -> Starlette:
    """Return the application."""
    routes = [
        Route("/", pages.root),
        Route("/console", pages.page),
        Route("/console/events", pages.events),
        Route("/console/traces/{name}", pages.trace),
        Route("/console/static/{path:path}", pages.file),
        Route("/health", pages.health),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Access, keys=keys)])
