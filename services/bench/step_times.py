"""How an executor spent the time in which answers were under way: in the engine, or waiting for a plan. Pure."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from services.bench.record import RequestRecord
from services.bench.statistics import percentile

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: when its result came, how long the engine computed, and how long it had waited for the plan before."""

    arrived_s: float
    duration_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class ExecutorFigures:
    """Shares are of `busy_s`, the time in which at least one answer was between its first and its last piece.

    `idle_share`: the engine waited for a plan. `engine_share`: it computed. The rest went into the executor's own
    bookkeeping and, at both ends of a busy time, into the pieces' way to the client.
    """

    num_steps: int
    median_step_ms: float
    p99_step_ms: float
    busy_s: float
    idle_share: float
    engine_share: float


def executor_figures(steps: Sequence[StepTime], busy: Sequence[Span]) -> ExecutorFigures:
    """Return the figures of one executor's steps over disjoint, sorted busy spans."""
    busy_s = sum(end - begin for begin, end in busy)
    durations_ms = sorted(step.duration_s * 1e3 for step in steps if step.duration_s > 0)
    idle_s = engine_s = 0.0
    for step in steps:
        began_s = step.arrived_s - step.duration_s
        engine_s += overlap_s((began_s, step.arrived_s), busy)
        idle_s += overlap_s((began_s - step.idle_s, began_s), busy)
    return ExecutorFigures(
        num_steps=len(steps),
        median_step_ms=percentile(durations_ms, 50),
        p99_step_ms=percentile(durations_ms, 99),
        busy_s=busy_s,
        idle_share=idle_s / busy_s if busy_s else 0.0,
        engine_share=engine_s / busy_s if busy_s else 0.0,
    )


def busy_spans(records: Iterable[RequestRecord]) -> list[Span]:
    """Return when at least one answer was between its first and its last piece: disjoint, in order."""
    return merged((record.pieces_s[0], record.pieces_s[-1]) for record in records if record.pieces_s)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, disjoint and in order."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap_s(span: Span, others: Sequence[Span]) -> float:
    """Return how much of `span` lies in the other spans, which are disjoint and in order."""
    total_s = 0.0
    first = max(bisect_right(others, span[0], key=itemgetter(0)) - 1, 0)
    for begin, end in itertools.islice(others, first, None):
        if begin >= span[1]:
            break
        total_s += max(0.0, min(span[1], end) - max(span[0], begin))
    return total_s
