"""The scheduler's part of a request's trace: how long its sequences waited, what let them in, what threw them back.

Each wait is a `scheduler.queue` span; what made a sequence wait again (a preemption, a lost executor, another scheduler
before this one) is an event at its beginning. Each way in is a `scheduler.admit` span: the question for blocks, and how
many tokens of the prompt were found there. Knows no bus; times are Unix seconds.
"""

from collections.abc import Iterable

from opentelemetry.sdk.trace import Event

from services.runtime.telemetry import Attributes, Tracing, event
from services.scheduler.requests import Sequence, Setback, SetbackKind

REQUEST_ID = "natterjack.request_id"
CHOICE = "natterjack.choice"
EXECUTOR = "natterjack.executor"
NUM_KEPT = "natterjack.num_tokens_kept"
"""Generated tokens that need not be generated again."""


class RequestSpans:
    """Records the spans of one scheduler's sequences, those of requests that are traced."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def admitted(self, executor: str, sequences: Iterable[Sequence], asked_s: float, now_s: float) -> None:
        """Show the wait of sequences that may run now, and what their admission found."""
        for sequence in sequences:
            if (parent := sequence.request.traceparent) is None:
                continue
            self._waited(sequence, parent, asked_s, {})
            self._tracing.record(
                "scheduler.admit",
                parent=parent,
                start_s=asked_s,
                end_s=now_s,
                attributes={
                    REQUEST_ID: sequence.request.work.request_id,
                    CHOICE: sequence.index,
                    EXECUTOR: executor,
                    "gen_ai.usage.cache_read.input_tokens": sequence.num_cached,
                },
            )

    def returned(self, executor: str, sequences: Iterable[Sequence], was_lost: bool, now_s: float) -> None:
        """Note why sequences wait again; one that was only refused goes on with the wait that it was in."""
        for sequence in sequences:
            if sequence.is_admitted:
                kind: SetbackKind = "executor_lost" if was_lost else "preempted"
                sequence.setback = Setback(kind, executor, now_s, sequence.num_generated)

    def ended(self, sequence: Sequence, code: str, now_s: float) -> None:
        """Show the wait of a sequence that an error ends before it was let in."""
        parent = sequence.request.traceparent
        if parent is not None and sequence.status in ("waiting", "acquiring"):
            self._waited(sequence, parent, now_s, {"error.type": code})

    def _waited(self, sequence: Sequence, parent: str, until_s: float, more: dict[str, str]) -> None:
        since_s = sequence.setback.at_s if sequence.setback is not None else sequence.request.received_s
        self._tracing.record(
            "scheduler.queue",
            parent=parent,
            start_s=since_s,
            end_s=max(since_s, until_s),
            attributes={REQUEST_ID: sequence.request.work.request_id, CHOICE: sequence.index, **more},
            events=_setbacks(sequence),
        )


def _setbacks(sequence: Sequence) -> tuple[Event, ...]:
    request, setback = sequence.request, sequence.setback
    if setback is not None:
        where: Attributes = {EXECUTOR: setback.executor, NUM_KEPT: setback.num_generated}
        return (event(f"natterjack.{setback.kind}", setback.at_s, where),)
    if request.is_resumed:
        known: Attributes = {"natterjack.epoch": request.epoch, NUM_KEPT: sequence.num_durable}
        return (event("natterjack.taken_over", request.received_s, known),)
    return ()
