"""Writes what the wiretap hears: a thread of its own decodes, filters, redacts and compresses.

The recording says what is missing: what the queue had no room for, what the numbers of steps and chunks show, and how
often the connection was lost.
"""

import os
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.recording.arrivals import Replies, captured_of
from services.recording.capture_file import Captured, CaptureWriter, Header, Note
from services.recording.filters import Filters
from services.recording.gaps import GapCounter
from services.recording.message_kinds import kind_name
from services.recording.redaction import redact
from services.recording.request_tracker import RequestTracker
from services.recording.wiretap import Heard, Wiretap

FLUSH_PERIOD_S = 1.0
NICENESS = 19
"""Of the writing thread: it gets what processor time nobody else wants, and the queue waits for it."""
INBOX_PREFIX = "_INBOX."


@dataclass(slots=True)
class Totals:
    """What was recorded so far."""

    num_messages: int = 0
    num_finished: int = 0
    num_refused: int = 0

    @property
    def num_ended(self) -> int:
        """Requests that came to an end: a final chunk, or a refusal."""
        return self.num_finished + self.num_refused


class Recorder:
    """The writing thread; `start` and `stop` it around an open wiretap."""

    def __init__(self, wiretap: Wiretap, path: Path, header: Header, filters: Filters) -> None:
        self.totals = Totals()
        self.error: BaseException | None = None
        self.gaps = GapCounter()
        self._wiretap = wiretap
        self._writer = CaptureWriter(path, header)
        self._redaction = header.redaction
        self._filters = filters
        self._tracker = RequestTracker()
        self._replies = Replies()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self, state: Iterable[Captured]) -> None:
        """Open the file, write the deployment's state, begin to write what is heard; raises CaptureError."""
        self._writer.open()
        for captured in state:
            self._write(captured)
        self._thread.start()

    def stop(self, num_reconnects: int) -> dict[str, Any]:
        """Write what was heard and the closing note, which is returned."""
        self._wiretap.hand_over()
        self._stopping.set()
        self._thread.join()
        facts = self.facts(num_reconnects)
        self._writer.write(Note(time.time(), "end", facts))
        self._writer.close()
        return facts

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """Hand a note to the writing thread."""
        self._wiretap.note(Note(time.time(), kind, facts))

    def facts(self, num_reconnects: int) -> dict[str, Any]:
        """Return what the closing note says."""
        return {
            "num_messages": self.totals.num_messages,
            "num_requests_ended": self.totals.num_ended,
            "num_dropped": dict(self._wiretap.num_dropped),
            "num_missing": dict(self.gaps.num_missing),
            "num_reconnects": num_reconnects,
        }

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        flushed_s = time.monotonic()
        try:
            while True:
                try:
                    batch = self._wiretap.queue.get(timeout=FLUSH_PERIOD_S / 4)
                except queue.Empty:
                    if self._stopping.is_set():
                        return
                else:
                    for item in batch:
                        self._take(item)
                if time.monotonic() - flushed_s > FLUSH_PERIOD_S:
                    flushed_s = time.monotonic()
                    self._writer.flush()
        except OSError as error:  # a full disk: the command ends and says so
            self.error = error

    def _take(self, item: Heard | Note) -> None:
        self._wiretap.num_taken += 1
        if isinstance(item, Note):
            self._writer.write(item)
            return
        self._wiretap.num_bytes_taken += len(item.raw.body)
        captured = captured_of(item.arrived_s, item.raw)
        if captured is None:
            return
        for ready in self._replies.sort(captured, is_reply=captured.subject.startswith(INBOX_PREFIX)):
            self.gaps.see(ready)
            self._write(ready)

    def _write(self, captured: Captured) -> None:
        if not self._filters.keeps(captured, self._tracker):
            return
        self._count(captured)
        self._writer.write(replace(captured, body=redact(captured.schema, captured.body, self._redaction)))

    def _count(self, captured: Captured) -> None:
        self.totals.num_messages += 1
        kind = kind_name(captured)
        if kind == "output_chunk" and isinstance(captured.body, dict) and captured.body.get("final"):
            self.totals.num_finished += 1
        elif kind == "error" and ".generate." in (captured.answers or ""):
            self.totals.num_refused += 1
