"""ASGI middleware: who may look, and what browsers may do with what they get.

With `console.api_keys` everybody needs one, as the password of HTTP Basic (browsers ask for it by themselves, and then
send it with scripts and event streams as well) or as a bearer token. Without, only requests that call this server by a
loopback name are answered, so that no web page elsewhere can read it by renaming itself (DNS rebinding).
"""

import base64
import binascii
import hashlib
import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Access:
    """Refuses whom it does not know, and gives every response the headers that keep a browser strict."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = tuple(_digest(key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send_strict)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["path"] in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        if self._digests:
            if self._knows(_secret(headers.get("authorization", ""))):
                return None
            ask = {"WWW-Authenticate": 'Basic realm="Natterjack console", charset="UTF-8"'}
            return PlainTextResponse("The console needs one of console.api_keys as the password.\n", 401, ask)
        if host_name(headers.get("host", "")) in LOOPBACK_NAMES:
            return None
        text = "Without console.api_keys the console answers only at a loopback name, such as http://127.0.0.1.\n"
        return PlainTextResponse(text, 403)

    def _knows(self, key: str) -> bool:
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, so that time tells nothing
        return any(matches)


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()


def _secret(authorization: str) -> str:
    """Return the bearer token or the password; empty when there is none."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
