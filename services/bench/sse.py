"""Server-sent events of OpenAI's streams: bytes in, the JSON of each event out. Pure."""

from collections.abc import Iterator

import orjson

DONE = b"[DONE]"


class EventStreamError(Exception):
    """An event is no JSON."""


class EventReader:
    """Cuts a byte stream into events, wherever the network cut it; what is no `data` is skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def feed(self, data: bytes) -> Iterator[dict[str, object]]:
        """Yield the objects of the events that `data` completes, up to `[DONE]`."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            payload = _data_of(event)
            if payload == DONE:
                self.is_done = True
            elif payload and not self.is_done:
                try:
                    parsed = orjson.loads(payload)
                except orjson.JSONDecodeError:
                    raise EventStreamError(f"An event is no JSON: {payload[:80]!r}") from None
                if isinstance(parsed, dict):
                    yield parsed


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)
