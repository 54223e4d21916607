"""ASGI middleware: lets requests with a valid API key through."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from schemas.errors import Unauthenticated
from services.gateway.api_keys import ApiKeys
from services.gateway.error_shape import error_response

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
"""What probes and people need who are no clients of the model."""


class KeyCheck:
    """Refuses requests without a key, before their body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            headers = Headers(scope=scope)
            try:
                self._keys.check(headers.get("authorization"), headers.get("x-api-key"))
            except Unauthenticated as error:
                response = error_response(error, scope)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
