"""The output items of one response, as they come from chunks, and the events that tell of it. Pure.

Whole answers and streams are made by the same steps, so they cannot differ.
"""

from typing import Any

from schemas.output import ChoiceDelta, TokenText, ToolCallDelta

Event = dict[str, Any]


class Output:
    """One item per run of text, and one per call."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Tell whether the output ended at its length."""
        return self._is_cut

    def add(self, delta: ChoiceDelta) -> list[Event]:
        """Take what a chunk adds; return the events of it."""
        events: list[Event] = []
        if delta.text or (delta.logprobs and not self._is_in_call):
            events += self._text(delta.text, delta.logprobs or ())
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish_reason is not None:
            self._is_cut = delta.finish_reason == "length"
            if not self.items:
                events += self._text("", ())
            events += self._close("incomplete" if self._is_cut else "completed")
        return events

    def interrupt(self) -> None:
        """Note that nothing more comes: what is open stays incomplete."""
        if self._is_open:
            self.items[-1]["status"] = "incomplete"

    @property
    def _is_in_call(self) -> bool:
        return bool(self.items) and self.items[-1]["type"] == "function_call"

    def _text(self, text: str, tokens: tuple[TokenText, ...]) -> list[Event]:
        events = self._open_message() if not self.items or self._is_in_call else []
        item, place = self.items[-1], self._place()
        part, logprobs = item["content"][0], [_logprob(token) for token in tokens]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            named = {"item_id": item["id"], **place, "content_index": 0}
            events.append({"type": "response.output_text.delta", **named, "delta": text, "logprobs": logprobs})
        return events

    def _open_message(self) -> list[Event]:
        events = self._close("completed")
        number = f"_{len(self.items)}" if self.items else ""
        item = {"id": f"msg_{self._request_id}{number}", "type": "message", "status": "in_progress"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events += self._open({**item, "role": "assistant", "content": []})
        self.items[-1]["content"] = [part]
        named = {"item_id": item["id"], **self._place(), "content_index": 0}
        shown = {**part, "annotations": [], "logprobs": []}
        return [*events, {"type": "response.content_part.added", **named, "part": shown}]

    def _call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            events += self._close("completed")
            call_id = call.id or ""
            named = {"id": f"fc_{call_id.removeprefix('call_')}", "call_id": call_id, "name": call.name}
            events += self._open({**named, "type": "function_call", "status": "in_progress", "arguments": ""})
        item = self.items[-1]
        if call.arguments:
            item["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            events.append({"type": kind, "item_id": item["id"], **self._place(), "delta": call.arguments})
        return events

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(dict(item))
        self._is_open = True
        return [{"type": "response.output_item.added", **self._place(), "item": item}]

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        named = {"item_id": item["id"], **self._place()}
        if item["type"] == "message":
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                {"type": "response.output_text.done", **named, "content_index": 0, **text},
                {"type": "response.content_part.done", **named, "content_index": 0, "part": part},
            ]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **named, **done}]
        return [*events, {"type": "response.output_item.done", **self._place(), "item": item}]

    def _place(self) -> dict[str, int]:
        return {"output_index": len(self.items) - 1}


def _logprob(token: TokenText) -> dict[str, Any]:
    return {**_token(token), "top_logprobs": [_token(other) for other in token.top]}


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.token, "bytes": list(token.token_bytes), "logprob": token.logprob}
