"""Server-sent events as bytes. Pure; knows the format, not what the events tell."""

from typing import Any

from pydantic_core import to_json

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that the connection lives."""

_LINE_BREAKS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


def data_event(fields: dict[str, Any]) -> bytes:
    """Return one event. Many clients split the stream at every Unicode line break, which JSON allows in a string."""
    data = to_json(fields)
    for raw, escaped in _LINE_BREAKS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def typed_event(fields: dict[str, Any]) -> bytes:
    """Return one event that is named as its `type`."""
    return f"event: {fields['type']}\n".encode() + data_event(fields)


def with_id(events: list[bytes], event_id: str) -> bytes:
    """Join the events of one chunk; the last one carries the id, so that a place never lies inside a chunk."""
    if events:
        events[-1] = f"id: {event_id}\n".encode() + events[-1]
    return b"".join(events)
