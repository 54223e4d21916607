"""From what reaches the recorder to the lines of a capture. Pure: arrival times are given."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import orjson

from schemas.codec import SCHEMA_HEADER
from schemas.errors import ERROR_CODE_HEADER, ERROR_HEADER
from services.recording.capture_file import Captured
from services.recording.message_kinds import ERROR_SCHEMA, KINDS, kind_name
from services.runtime.telemetry import TRACE_HEADER
from services.runtime.transport import PREVIOUS_SEQUENCE_HEADER, SEQUENCE_HEADER, TTL_HEADER, RawMessage

T = TypeVar("T")

MAX_HELD_REPLIES = 4096
MAX_OPEN_REQUESTS = 100_000
KEPT_HEADERS = frozenset({SEQUENCE_HEADER, PREVIOUS_SEQUENCE_HEADER, TTL_HEADER, ERROR_CODE_HEADER})
"""Others say nothing more, or may repeat what a redaction takes out of the body."""
QUESTIONS = frozenset({name for name in KINDS if name.endswith("_request")} | {"cache_command"})
"""What is answered; a command to many instances has as many answers."""
SCHEMA_BY_HAND = {"generate": "generate_request/1", "cancel": "cancel/1"}
"""What a person sends with the `nats` command, without a schema header."""


class Replies:
    """Puts replies beside their requests, and leaves out those to other deployments' requests.

    Two subscriptions have no common order, so a reply that comes before its request waits for it.
    """

    def __init__(self) -> None:
        self._asked: OrderedDict[str, str] = OrderedDict()
        self._held: OrderedDict[str, list[Captured]] = OrderedDict()

    def sort(self, captured: Captured, *, is_reply: bool) -> Iterator[Captured]:
        """Yield what may be written now."""
        if is_reply:
            answers = self._asked.get(captured.subject)
            if answers is not None:
                yield replace(captured, answers=answers)
            else:
                held = [*self._held.get(captured.subject, ()), captured]
                _keep(self._held, captured.subject, held, MAX_HELD_REPLIES)
            return
        yield captured
        if captured.reply is not None and kind_name(captured) in QUESTIONS:
            _keep(self._asked, captured.reply, captured.subject, MAX_OPEN_REQUESTS)
            for held_one in self._held.pop(captured.reply, ()):
                yield replace(held_one, answers=captured.subject)


def captured_of(arrived_s: float, raw: RawMessage) -> Captured | None:
    """Return the message as a capture holds it; None for the server's own and for a deletion from a bucket.

    A body that is no JSON (somebody's by hand) is kept as text, for it was refused and that is worth seeing.
    """
    if not raw.body and SCHEMA_HEADER not in raw.headers:
        return None
    try:
        body = orjson.loads(raw.body)
    except orjson.JSONDecodeError:
        body = raw.body.decode("utf-8", "replace")
    return Captured(
        arrived_s=arrived_s,
        subject=raw.subject,
        body=body,
        schema=_schema_of(raw),
        trace=raw.headers.get(TRACE_HEADER),
        reply=raw.reply,
        headers={key: value for key, value in raw.headers.items() if key in KEPT_HEADERS},
    )


def _schema_of(raw: RawMessage) -> str | None:
    if ERROR_HEADER in raw.headers:
        return ERROR_SCHEMA
    given = raw.headers.get(SCHEMA_HEADER)
    tokens = raw.subject.split(".")
    return given or (SCHEMA_BY_HAND.get(tokens[2]) if len(tokens) > 2 else None)


def _keep(memory: "OrderedDict[str, T]", key: str, value: T, limit: int) -> None:
    memory[key] = value
    if len(memory) > limit:
        memory.popitem(last=False)
