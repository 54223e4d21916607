"""Asks any server with OpenAI's streaming completions or chat completions, and notes when each piece came."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Literal

import orjson

from services.bench.client import RequestFailed, RequestOptions
from services.bench.http_connection import ConnectionLost, ConnectionPool
from services.bench.prompts import Prompt
from services.bench.record import RequestRecord
from services.bench.sse import EventReader, EventStreamError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_REASON_CHARS = 200


class HttpClient:
    """One benchmark's client; `close` it at the end."""

    def __init__(
        self, url: str, options: RequestOptions, endpoint: Endpoint = "completions", headers: Mapping[str, str] = {}
    ) -> None:
        self._pool = ConnectionPool(url.rstrip("/").removesuffix("/v1"), headers)
        self._options = options
        self._endpoint: Endpoint = endpoint

    async def run(self, prompt: Prompt, record: RequestRecord) -> None:
        """See `Client.run`."""
        endpoint: Endpoint = "chat" if prompt.messages is not None else self._endpoint
        body = orjson.dumps(self._body(prompt, endpoint))
        answer = _Answer(record, endpoint, self._options.keep_text)
        record.started_s = perf_counter()
        try:
            status = await self._pool.exchange("POST", PATHS[endpoint], body, answer.take)
        except (OSError, TimeoutError, ConnectionLost) as error:
            raise RequestFailed(str(error) or type(error).__name__) from None
        record.ended_s = perf_counter()
        answer.check(status)

    async def first_model(self) -> str:
        """Return the id of the first model that the server lists; raises RequestFailed."""
        parts: list[bytes] = []
        try:
            status = await self._pool.exchange("GET", "/v1/models", b"", parts.append)
            models = orjson.loads(b"".join(parts))["data"] if status == 200 else []
            return str(models[0]["id"])
        except (OSError, TimeoutError, ConnectionLost) as error:
            raise RequestFailed(f"Nothing answers there: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError):
            raise RequestFailed("The server lists no model at /v1/models; name one with --model.") from None

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _body(self, prompt: Prompt, endpoint: Endpoint) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": prompt.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if endpoint == "completions":
            body["prompt"] = prompt.content
        else:
            body["messages"] = prompt.messages or [{"role": "user", "content": _text_of(prompt)}]
        return body | options.extra


def _text_of(prompt: Prompt) -> str:
    if not isinstance(prompt.content, str):
        raise RequestFailed("A conversation takes text, not token ids: use the completions endpoint.")
    return prompt.content


class _Answer:
    """Follows one stream and fills the record."""

    def __init__(self, record: RequestRecord, endpoint: Endpoint, keep_text: bool) -> None:
        self._record = record
        self._is_chat = endpoint == "chat"
        self._keep_text = keep_text
        self._events = EventReader()
        self._start = b""
        self._error = ""
        self._num_pieces = 0

    def take(self, data: bytes) -> None:
        """Take bytes of the body, all of which came now."""
        now_s = perf_counter()
        if len(self._start) < MAX_REASON_CHARS:
            self._start += data
        try:
            for event in self._events.feed(data):
                self._event(event, now_s)
        except EventStreamError as error:
            self._error = self._error or str(error)

    def _event(self, event: dict[str, Any], now_s: float) -> None:
        if (usage := event.get("usage")) is not None:
            self._record.num_prompt_tokens = usage.get("prompt_tokens", 0)
            self._record.num_output_tokens = usage.get("completion_tokens", 0)
            self._record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if (error := event.get("error")) is not None:
            self._error = self._error or _reason(error)
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if self._is_chat else choice.get("text")
            if text:
                self._record.pieces_s.append(now_s)
                self._num_pieces += 1
                if self._keep_text:
                    self._record.text += text

    def check(self, status: int) -> None:
        """Raise RequestFailed unless the answer came whole; a server that counts no tokens sent one a piece."""
        if status != 200:
            raise RequestFailed(f"HTTP {status}: {_refusal(self._start)}")
        if self._error:
            raise RequestFailed(self._error)
        if not self._events.is_done:
            raise RequestFailed("The stream ended without [DONE].")
        self._record.num_output_tokens = self._record.num_output_tokens or self._num_pieces


def _refusal(body: bytes) -> str:
    try:
        return _reason(orjson.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body[:MAX_REASON_CHARS].decode(errors="replace")


def _reason(error: object) -> str:
    """Return an error object's code, which groups better than its message, which may name the request."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("message") or error.get("type"))[:MAX_REASON_CHARS]
    return str(error)[:MAX_REASON_CHARS]
