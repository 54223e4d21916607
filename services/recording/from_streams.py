"""One request as the streams remember it afterwards: its output, its work item while it is queued. An edge."""

from datetime import datetime

from schemas.errors import NatterjackError
from services.recording.arrivals import captured_of
from services.recording.capture_file import Captured
from services.runtime.bus import Bus
from services.runtime.transport import RawMessage, StoredMessage

TIME_HEADER = "Nats-Time-Stamp"


async def read_request(bus: Bus, request_id: str) -> list[Captured]:
    """Return what is stored of a request, in order of time; empty when nothing is (left)."""
    subjects = bus.subjects
    found = await bus.transport.read(subjects.out_stream, subjects.out(request_id), 0)
    stored = [captured for message in found if (captured := _captured(message)) is not None]
    for message in await _queued(bus):
        captured = _captured(message)
        if captured is not None and isinstance(captured.body, dict) and captured.body.get("request_id") == request_id:
            stored.append(captured)
    return sorted(stored, key=lambda captured: captured.arrived_s)


async def _queued(bus: Bus) -> list[StoredMessage]:
    try:
        return await bus.transport.read(bus.subjects.work_stream, bus.subjects.work_all, 0)
    except NatterjackError:  # a stream without direct reads: the output alone tells enough
        return []


def _captured(message: StoredMessage) -> Captured | None:
    captured = captured_of(_stored_s(message), RawMessage(message.subject, message.headers, message.body))
    if captured is None:
        return None
    return Captured(
        captured.arrived_s, captured.subject, captured.body, captured.schema, captured.trace, is_stored=True
    )


def _stored_s(message: StoredMessage) -> float:
    """Return when the server stored it (RFC 3339 with nanoseconds); 0 where the store does not tell."""
    text = message.headers.get(TIME_HEADER)
    if text is None:
        return 0.0
    seconds, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}+00:00").timestamp() + float(f"0.{fraction or 0}")
