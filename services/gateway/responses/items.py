"""Items of a Responses conversation: input becomes turns of a chat, output becomes the next input. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from schemas.errors import UnsupportedParameter
from schemas.responses import (
    AskedResponse,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputPart,
    Item,
    MessageItem,
    TextPart,
)

ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""
PREFIXES = {MessageItem: "msg", FunctionCallItem: "fc", FunctionCallOutputItem: "fco"}

Turn = dict[str, Any]


def items_of(body: AskedResponse) -> tuple[Item, ...]:
    """Return the input as items."""
    if isinstance(body.input, str):
        return (MessageItem(type="message", role="user", content=body.input),)
    return body.input


def check_items(items: Iterable[Item]) -> None:
    """Raise UnsupportedParameter, with its place in the input, for what this server cannot take."""
    for number, item in enumerate(items):
        match item:
            case MessageItem(content=content) | FunctionCallOutputItem(output=content):
                field = "content" if isinstance(item, MessageItem) else "output"
                _check_parts(content, f"input.{number}.{field}")
            case FunctionCallItem():
                pass
            case _:
                raise _refused(f"an item of type {item.type[:64]!r}", f"input.{number}")


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """Return the turns of a chat; calls belong to the assistant's turn that they follow."""
    turns: list[Turn] = []
    for item in items:
        match item:
            case MessageItem():
                turns.append({"role": ROLES.get(item.role, item.role), "content": _content(item.content)})
            case FunctionCallItem():
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": None})
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                turns[-1].setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    return turns


def items_from(output: Iterable[dict[str, Any]]) -> tuple[Item, ...]:
    """Return output items as a next request's input would hold them."""
    return tuple(
        MessageItem(id=item["id"], role="assistant", content="".join(part["text"] for part in item["content"]))
        if item["type"] == "message"
        else FunctionCallItem.model_validate(item)
        for item in output
    )


def listed(items: Sequence[Item], request_id: str) -> list[dict[str, Any]]:
    """Return items as /input_items shows them; those without an id get one that tells their place."""
    return [_shown(item, f"{PREFIXES.get(type(item), 'item')}_{request_id}_{n}") for n, item in enumerate(items)]


def _shown(item: Item, default_id: str) -> dict[str, Any]:
    fields = item.model_dump(mode="json", exclude_none=True)
    fields = {"id": default_id, **fields, "type": fields.get("type", "message"), "status": "completed"}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = [item.content] if isinstance(item.content, str) else [_text_of(part) for part in item.content]
        fields["content"] = [{"type": kind, "text": text} for text in parts]
    return fields


def _content(content: str | tuple[InputPart, ...]) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": _text_of(part)} for part in content]


def _text_of(part: InputPart) -> str:
    return part.text if isinstance(part, TextPart) else ""


def _check_parts(content: str | tuple[InputPart, ...], path: str) -> None:
    for number, part in enumerate(() if isinstance(content, str) else content):
        if not isinstance(part, TextPart):
            raise _refused(f"content of type {part.type[:64]!r}", f"{path}.{number}")


def _refused(what: str, path: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{path}: {what} cannot be taken here; this server takes text.", param=path)
