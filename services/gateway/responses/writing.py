"""Output chunks become a response object, whole or as typed events with numbers. Pure: bytes out.

The same chunks give the same events with the same numbers at any gateway, so a stream can be read on from a number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from schemas.errors import Cancelled, ErrorBody
from schemas.generation import Accepted
from schemas.output import OutputChunk, Usage
from schemas.responses import AskedResponse, Item, StoredResponse
from services.gateway.events import KEEP_ALIVE, typed_event, with_id
from services.gateway.responses.output import Event, Output
from services.gateway.responses.translate import ID_PREFIX
from services.gateway.resumption import event_id

ERROR_CODE = "server_error"
"""The one code of OpenAI's closed list that fits what can happen here; our own is beside it as `type`."""


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """/v1/responses; `read` chunks, and events up to number `after`, are known to the client already."""

    body: AskedResponse
    before: tuple[Item, ...] = ()
    read: int = 0
    after: int = -1

    def record(self, accepted: Accepted) -> StoredResponse:
        """Return what is kept of an accepted response."""
        asked = {name: getattr(self.body, name) for name in AskedResponse.model_fields}
        return StoredResponse(
            request_id=accepted.request_id,
            model=accepted.model,
            created_s=accepted.created_s,
            num_prompt_tokens=accepted.num_prompt_tokens,
            before=self.before,
            body=AskedResponse.model_construct(**asked),
        )

    def fold(self, accepted: Sequence[Accepted]) -> "ResponseFold":
        return ResponseFold(self.record(accepted[0]))

    def events(self, accepted: Sequence[Accepted]) -> "ResponseEvents":
        return ResponseEvents(self.record(accepted[0]), self.read, self.after)


class ResponseFold:
    """One response as far as its output has come."""

    def __init__(self, record: StoredResponse) -> None:
        self.record = record
        self.output = Output(record.request_id)
        self.usages = [Usage(prompt_tokens=record.num_prompt_tokens, completion_tokens=0)]
        self.error: ErrorBody | None = None
        self._has_begun = self._is_final = False

    def add(self, prompt: int, chunk: OutputChunk) -> None:
        """Take one chunk."""
        self.take(chunk)

    def take(self, chunk: OutputChunk) -> list[Event]:
        """Take one chunk; return the events of it."""
        self._has_begun = True
        self._is_final = chunk.final
        if chunk.error is not None:
            self.fail(chunk.error)
        if chunk.usage is not None:
            self.usages = [chunk.usage]
        return [event for delta in chunk.choices for event in self.output.add(delta)]

    def fail(self, error: ErrorBody) -> None:
        """End with an error."""
        self.error = error
        self.output.interrupt()

    @property
    def status(self) -> str:
        """Return how far the response is."""
        if self.error is not None:
            return "cancelled" if self.error.code == Cancelled.code else "failed"
        if not self._is_final:
            return "in_progress" if self._has_begun else "queued"
        return "incomplete" if self.output.is_cut else "completed"

    def fields(self, status: str | None = None) -> dict[str, Any]:
        """Return the response object."""
        status = status or self.status
        is_done = status in ("completed", "incomplete")
        return {
            "id": ID_PREFIX + self.record.request_id,
            "object": "response",
            "created_at": int(self.record.created_s),
            "status": status,
            "error": _error(self.error) if self.error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.record.model,
            "output": self.output.items,
            "usage": _usage(self.usages[0]) if is_done else None,
            **_asked(self.record.body),
        }

    def body(self) -> bytes:
        """Return the response as JSON."""
        return to_json(self.fields())


class ResponseEvents:
    """The events of one streamed response, in order."""

    def __init__(self, record: StoredResponse, read: int = 0, after: int = -1) -> None:
        self._fold = ResponseFold(record)
        self._id = record.request_id
        self._read = read
        self._after = after
        self._position = 0
        self._next_number = 0

    @property
    def usages(self) -> list[Usage]:
        """The token counts, once they are known."""
        return self._fold.usages

    def begin(self) -> bytes:
        """Tell the id at once: with it the response can be cancelled and found again."""
        opening = {"response": self._fold.fields("in_progress")}
        kinds = ("response.created", "response.in_progress")
        events = self._numbered({"type": kind, **opening} for kind in kinds)
        return b"" if self._read else b"".join(events)

    def chunk(self, prompt: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk."""
        events = self._numbered(self._fold.take(chunk))
        self._position += 1
        if self._position <= self._read:
            return b""
        return with_id(events, event_id(self._id, [self._position]))

    def end(self) -> bytes:
        """Return the last event, with the whole response."""
        return self._last(f"response.{self._fold.status}")

    def failure(self, error: ErrorBody) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        self._fold.fail(error)
        return self._last("response.failed")

    def keep_alive(self) -> bytes:
        """Return what is written in a long silence."""
        return KEEP_ALIVE

    def _last(self, kind: str) -> bytes:
        return b"".join(self._numbered([{"type": kind, "response": self._fold.fields()}]))

    def _numbered(self, events: Iterable[Event]) -> list[bytes]:
        written: list[bytes] = []
        for event in events:
            number = self._next_number
            self._next_number += 1
            if number > self._after:
                written.append(typed_event({"type": event["type"], "sequence_number": number, **event}))
        return written


def _asked(body: AskedResponse) -> dict[str, Any]:
    """The fields of the request that the response repeats, with OpenAI's values for what was left out."""
    text = body.text.model_dump(exclude_none=True) if body.text is not None else {}
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump(mode="json") for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _error(error: ErrorBody) -> dict[str, Any]:
    return {"code": ERROR_CODE, "message": error.message, "type": error.code, "param": error.param}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
