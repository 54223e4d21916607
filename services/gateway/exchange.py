"""The outermost layer around every HTTP request: its id, its span, its log line, and the last resort for our bugs."""

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import InternalError, Unavailable
from services.gateway import spans
from services.gateway.connection import ClientGone
from services.gateway.error_shape import error_response, name_request
from services.gateway.messages import error_object
from services.runtime.logs import request_logging
from services.runtime.metrics import Metrics
from services.runtime.telemetry import TRACE_HEADER, Tracing

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED = 499
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Polled every second or so: logged at debug level only."""
MAX_LOGGED_PATH = 120

_EXCHANGE_ID = "natterjack.exchange_id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Exchange:
    """ASGI middleware: one request and its response.

    `X-Request-Id` comes back as the client sent it, or else is the exchange's own id; log lines carry it. What a client
    sends there never names a generation, so that two clients that send the same do not meet.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing, metrics: Metrics) -> None:
        self._app = app
        self._tracing = tracing
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})[_EXCHANGE_ID] = uuid.uuid4().hex
        given_id = headers.get(REQUEST_ID_HEADER, "")
        request_id = given_id if _SANE_ID.fullmatch(given_id) else exchange_id(scope)
        name_request(scope, request_id)
        traceparent = headers.get(TRACE_HEADER)
        with (
            request_logging(request_id),
            spans.exchange_span(self._tracing, scope["method"], scope["path"], traceparent),
        ):
            await self._run(scope, receive, _Reply(send, _id_headers(scope["path"], request_id)))

    async def _run(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        started_s = time.perf_counter()
        try:
            await self._app(scope, receive, reply.send)
        except ClientGone:
            reply.status = CLIENT_CLOSED
        except asyncio.CancelledError:  # only at the gateway's stop: nothing around this layer waits for it
            if reply.status is None:
                await error_response(Unavailable("This gateway is stopping."), scope)(scope, receive, reply.send)
        except Exception:
            if reply.status is not None:  # the server closes the connection, and logs the cause
                raise
            log.exception("a bug while answering a request")
            error = InternalError("An internal error occurred; the log has the cause under the request id.")
            await error_response(error, scope)(scope, receive, reply.send)
        finally:
            status = reply.status or CLIENT_CLOSED
            spans.describe_outcome(status)
            self._metrics.counter("http_requests_total", _route(scope), str(status)).add()
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            duration_ms = 1e3 * (time.perf_counter() - started_s)
            log.log(level, "%s %s %d %.0f ms", scope["method"], _logged_path(scope), status, duration_ms)


def exchange_id(scope: Scope) -> str:
    """Return the id that we gave this exchange: unique, whatever the client sends."""
    return str(scope["state"][_EXCHANGE_ID])


class _Reply:
    """Passes the response on, adding the request id and noting the status."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def _id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    names = [REQUEST_ID_HEADER, error_object.REQUEST_ID_HEADER] if error_object.is_served(path) else [REQUEST_ID_HEADER]
    return [(name.encode(), request_id.encode()) for name in names]


def _route(scope: Scope) -> str:
    """The route's pattern; never the path, of which a client could make up any number."""
    return str(getattr(scope.get("route"), "path", "none"))


def _logged_path(scope: Scope) -> str:
    """The path as it was sent, percent-encoded: a decoded one could hold a line break and forge a log line."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw[:MAX_LOGGED_PATH].decode("latin-1"))[1:-1]
