"""A recording from its beginning to its closing note: the wiretap and the writing thread around a block. An edge."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schemas.errors import NatterjackError
from services.recording.capture_file import Captured, CaptureError, CaptureWriter, Header, Note, Redaction
from services.recording.engines import engines_in
from services.recording.filters import Filters
from services.recording.from_streams import read_request
from services.recording.recorder import Recorder
from services.recording.redaction import redact
from services.recording.wiretap import Wiretap
from services.runtime.bus import Bus
from services.runtime.service import version


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be recorded, and where to."""

    path: Path
    filters: Filters = field(default_factory=Filters)
    redaction: Redaction = "none"
    label: str = ""

    def header(self, prefix: str, engines: Iterable[str] = ()) -> Header:
        """Return the first line of the file."""
        return Header(
            natterjack=version(),
            started_s=time.time(),
            prefix=prefix,
            redaction=self.redaction,
            filters=(*sorted(self.filters.kinds), *(f"request={name}" for name in sorted(self.filters.requests))),
            label=self.label,
            engines=tuple(sorted(set(engines))),
        )

    def redacted(self, captured: Captured) -> Captured:
        """Return the message as it may be written."""
        return replace(captured, body=redact(captured.schema, captured.body, self.redaction))


@dataclass(slots=True)
class Session:
    """A recording that runs; `closing` is filled when it has ended."""

    recorder: Recorder
    closing: dict[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def recording(bus: Bus, wish: Wish) -> AsyncIterator[Session]:
    """Record while the block runs; raises CaptureError when the file cannot be written."""
    wiretap = Wiretap(bus, wish.filters)
    await wiretap.open()
    try:
        state = await wiretap.read_state()
        header = wish.header(bus.subjects.prefix, engines_in(state))
        recorder = Recorder(wiretap, wish.path, header, wish.filters)
        session = Session(recorder)
        recorder.start(state)
        try:
            yield session
        finally:
            with contextlib.suppress(NatterjackError):  # what was sent before the end shall be in the file
                await bus.transport.flush()
            session.closing = recorder.stop(bus.transport.state.num_reconnects)
    finally:
        await wiretap.close()
    if recorder.error is not None:
        raise CaptureError(f"The recording {wish.path} broke off: {recorder.error}.") from recorder.error


async def record_from_streams(bus: Bus, request_id: str, wish: Wish) -> int:
    """Write what the streams hold of one request; returns the number of messages, 0 when there is nothing."""
    found = await read_request(bus, request_id)
    if not found:
        return 0
    header = wish.header(bus.subjects.prefix).model_copy(update={"source": "streams"})
    with CaptureWriter(wish.path, header) as writer:
        for captured in found:
            writer.write(wish.redacted(captured))
        writer.write(Note(time.time(), "end", {"num_messages": len(found)}))
    return len(found)
