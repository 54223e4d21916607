"""What the scheduler counts and measures: queueing, prefill and decode times, preemptions, epochs. Knows no bus.

Gauges are read from the book and the sessions; the rest is told by the service where it happens.
"""

import time
from collections.abc import Mapping
from typing import Protocol

from schemas.step import StepPlan
from services.runtime.metrics import Metrics
from services.scheduler.book import RequestBook
from services.scheduler.executor_state import ExecutorState, Progress
from services.scheduler.requests import Request, Sequence


class Session(Protocol):
    """An executor that is driven."""

    state: ExecutorState | None


class SchedulerMeters:
    """The metrics of one scheduler."""

    def __init__(self, metrics: Metrics, book: RequestBook, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions
        self._cancelled_s: dict[str, float] = {}
        self._queue_time = metrics.histogram("request_queue_time_seconds")
        self._prefill_time = metrics.histogram("request_prefill_time_seconds")
        self._decode_time = metrics.histogram("request_decode_time_seconds")
        self._step_tokens = metrics.histogram("iteration_tokens_total")
        self._abort_time = metrics.histogram("time_to_abort_seconds")
        self._preemptions = metrics.counter("num_preemptions_total")
        self._lost_epochs = metrics.counter("executor_restarts_total")
        self._redeliveries = metrics.counter("redeliveries_total")
        self._dead_letters = metrics.counter("dead_letters_total")
        metrics.gauge("num_requests_running", lambda: book.num_running)
        metrics.gauge("num_requests_waiting", lambda: book.num_waiting)
        metrics.gauge("num_executors", lambda: len(self._states()))
        metrics.gauge("oldest_request_age_seconds", lambda: _oldest_age_s(book))
        metrics.gauges("num_steps_in_flight", lambda: {(n,): s.num_in_flight for n, s in self._states().items()})
        metrics.gauges("lease_epoch", lambda: {(n,): s.epoch for n, s in self._states().items()})

    def _states(self) -> dict[str, ExecutorState]:
        return {name: session.state for name, session in self._sessions.items() if session.state is not None}

    def delivered(self, num_delivered: int) -> None:
        """Note a work item from the queue."""
        if num_delivered > 1:
            self._redeliveries.add()

    def gave_up(self) -> None:
        """Note a work item that will not be served."""
        self._dead_letters.add()

    def planned(self, plan: StepPlan) -> None:
        """Note a plan that is sent."""
        self._step_tokens.observe(sum(run.num_tokens for run in plan.run))

    def admitted(self, sequences: list[Sequence], now_s: float) -> None:
        """Note sequences that may run now; `now_s` is Unix time, as is the acceptance."""
        for sequence in sequences:
            sequence.is_admitted = True
            if not sequence.first_admitted_s:
                sequence.first_admitted_s = now_s
                self._queue_time.observe(max(0.0, now_s - sequence.request.work.created_s))

    def returned(self, sequences: list[Sequence], was_lost: bool) -> None:
        """Note sequences that wait again: refused, preempted, or in an epoch that was lost."""
        self._lost_epochs.add(was_lost)
        for sequence in sequences:
            self._preemptions.add(sequence.is_admitted and not was_lost)
            sequence.is_admitted = False

    def progressed(self, progress: list[Progress], now_s: float) -> None:
        """Note new tokens and ends; of a resumed sequence, only what came since."""
        for item in progress:
            sequence = item.sequence
            if not sequence.first_token_s:
                sequence.first_token_s = now_s
                self._prefill_time.observe(now_s - sequence.first_admitted_s)
            if item.finish_reason is not None:
                self._decode_time.observe(now_s - sequence.first_token_s)

    def cancelled(self, request: Request) -> None:
        """Note a cancellation; `stored` or `let_go` follows."""
        self._cancelled_s.setdefault(request.work.request_id, time.perf_counter())

    def stored(self, request: Request) -> None:
        """Note that a request's end is in the log."""
        if (cancelled_s := self._cancelled_s.get(request.work.request_id)) is not None:
            self._abort_time.observe(time.perf_counter() - cancelled_s)

    def let_go(self, request: Request) -> None:
        """Note that the request is no longer held."""
        self._cancelled_s.pop(request.work.request_id, None)


def _oldest_age_s(book: RequestBook) -> float:
    quiet_since_s = min((request.quiet_since_s for request in book), default=None)
    return 0.0 if quiet_since_s is None else max(0.0, time.time() - quiet_since_s)
