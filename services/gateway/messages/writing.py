"""Output chunks become a Message, whole or as Anthropic's events. Pure: one object per HTTP response, bytes out.

A block is a run of text, or one tool call. `input_tokens` of the first event still holds those that turn out to be
cached; the last one has the exact counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from schemas.errors import BY_CODE, ErrorBody, InternalError
from schemas.generation import Accepted
from schemas.output import ChoiceDelta, OutputChunk, ToolCallDelta, Usage
from services.gateway.events import KEEP_ALIVE, typed_event, with_id
from services.gateway.messages.error_object import anthropic_error, anthropic_status
from services.gateway.resumption import event_id

PING = typed_event({"type": "ping"})
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """/v1/messages; `read` chunks are known to the client already."""

    request_id: str
    read: int = 0

    def fold(self, accepted: Sequence[Accepted]) -> "MessageFold":
        return MessageFold(accepted[0])

    def events(self, accepted: Sequence[Accepted]) -> "MessageEvents":
        return MessageEvents(accepted[0], self.request_id, self.read)


@dataclass(slots=True)
class _Ending:
    stop_reason: str | None = None
    stop_sequence: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        if delta.finish_reason is None:
            return
        self.stop_reason = STOP_REASONS[delta.finish_reason]
        if isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason

    def fields(self) -> dict[str, Any]:
        return {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


@dataclass(slots=True)
class _Text:
    pieces: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        return {"type": "text", "text": "".join(self.pieces)}


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        """The call; arguments that `max_tokens` cut off are what can be read of them."""
        return _tool_use(self.id, self.name, _readable("".join(self.arguments)))


class MessageFold:
    """One whole message."""

    def __init__(self, accepted: Accepted) -> None:
        self._accepted = accepted
        self._blocks: list[_Text | _Call] = []
        self._ending = _Ending()
        self.usages = [Usage(prompt_tokens=accepted.num_prompt_tokens, completion_tokens=0)]

    def add(self, prompt: int, chunk: OutputChunk) -> None:
        """Take one chunk."""
        if chunk.usage is not None:
            self.usages = [chunk.usage]
        for delta in chunk.choices:
            if delta.text:
                self._add_text(delta.text)
            for call in delta.tool_calls:
                self._add_call(call)
            self._ending.add(delta)

    def _add_text(self, text: str) -> None:
        if not self._blocks or not isinstance(self._blocks[-1], _Text):
            self._blocks.append(_Text())
        last = self._blocks[-1]
        if isinstance(last, _Text):
            last.pieces.append(text)

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            self._blocks.append(_Call(call.id or "", call.name))
        last = self._blocks[-1]
        if isinstance(last, _Call):
            last.arguments.append(call.arguments)

    def body(self) -> bytes:
        """Return the message as JSON."""
        content = [block.block() for block in self._blocks]
        return to_json({**_message(self._accepted, self.usages[0]), "content": content, **self._ending.fields()})


class MessageEvents:
    """The events of one streamed message, in order."""

    def __init__(self, accepted: Accepted, request_id: str, read: int = 0) -> None:
        self._accepted = accepted
        self._request_id = request_id
        self._read = read
        self._position = 0
        self._has_started = False
        self._block = -1
        self._open: str | None = None
        self._ending = _Ending()
        self.usages = [Usage(prompt_tokens=accepted.num_prompt_tokens, completion_tokens=0)]

    def begin(self) -> bytes:
        """Write nothing yet: a request that fails before its first chunk gets a real status."""
        return b""

    def chunk(self, prompt: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk."""
        if chunk.usage is not None:
            self.usages = [chunk.usage]
        events = self._start()
        for delta in chunk.choices:
            events += self._delta(delta)
        self._position += 1
        if self._position <= self._read:
            return b""
        return with_id(events, event_id(self._accepted.request_id, [self._position]))

    def end(self) -> bytes:
        """Return the end of the last block, how and why the message ended, and its usage."""
        events = [*self._start(), *self._close()]
        events.append(
            typed_event({"type": "message_delta", "delta": self._ending.fields(), "usage": _usage(self.usages[0])})
        )
        return b"".join([*events, typed_event({"type": "message_stop"})])

    def failure(self, error: ErrorBody) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        status = anthropic_status(error, BY_CODE.get(error.code, InternalError).http_status)
        return typed_event(anthropic_error(error, status, self._request_id))

    def keep_alive(self) -> bytes:
        """Return a ping, or a comment as long as the message has not begun."""
        return PING if self._has_started else KEEP_ALIVE

    def _start(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        message = {**_message(self._accepted, self.usages[0]), "content": [], **_Ending().fields()}
        return [typed_event({"type": "message_start", "message": message}), PING]

    def _delta(self, delta: ChoiceDelta) -> list[bytes]:
        events: list[bytes] = []
        if delta.text:
            if self._open != "text":
                events += self._open_block("text", {"type": "text", "text": ""})
            events.append(self._block_delta({"type": "text_delta", "text": delta.text}))
        for call in delta.tool_calls:
            events += self._call(call)
        self._ending.add(delta)
        return events

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        events: list[bytes] = []
        if call.name is not None:
            events += self._open_block("tool_use", _tool_use(call.id or "", call.name, {}))
        if call.arguments:
            events.append(self._block_delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _open_block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        closing = self._close()
        self._block += 1
        self._open = kind
        started = typed_event({"type": "content_block_start", "index": self._block, "content_block": block})
        return [*closing, started]

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return typed_event({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [typed_event({"type": "content_block_stop", "index": self._block})]


def _message(accepted: Accepted, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{accepted.request_id}",
        "type": "message",
        "role": "assistant",
        "model": accepted.model,
        "usage": _usage(usage),
    }


def _readable(arguments: str) -> dict[str, Any]:
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:  # nothing yet
        return {}
    return value if isinstance(value, dict) else {}


def _tool_use(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
