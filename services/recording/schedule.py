"""What a scheduler decided, read out of its plans, and how two schedules compare: order, batches, preemptions. Pure.

Two runs of the same requests never meet their steps at the same moments, so schedules are compared by figures within a
tolerance: the share of requests out of order (the fewest that would have to move), steps, sequences and tokens per
step, preemptions, cached tokens. Without a tolerance, as between two simulations, the first different step counts too.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.step import StepPlan
from services.recording.capture_file import Captured
from services.recording.comparison import Difference
from services.recording.message_kinds import kind_name, message_of
from services.recording.request_tracker import Place, executor_of

MAX_NAMED = 5
Batch = tuple[tuple[str, int, int], ...]
"""A step's runs: request, choice, tokens; in the order of their names, for the plan's own order says nothing."""


@dataclass(slots=True)
class Schedule:
    """The requests in order of admission, every executor's steps, and what happened to each request.

    A sequence that begins a second time in its epoch was preempted; in another one, its executor was taken over.
    """

    admitted: list[str] = field(default_factory=list)
    steps: dict[str, list[Batch]] = field(default_factory=dict)
    preemptions: "Counter[str]" = field(default_factory=Counter)
    cached: "Counter[str]" = field(default_factory=Counter)

    @property
    def num_steps(self) -> int:
        """Steps of all executors."""
        return sum(map(len, self.steps.values()))

    def figures(self) -> dict[str, float]:
        """Return what is compared within a tolerance, by name."""
        batches = [batch for steps in self.steps.values() for batch in steps]
        number = max(1, len(batches))
        return {
            "steps": len(batches),
            "sequences per step": sum(map(len, batches)) / number,
            "tokens per step": sum(tokens for batch in batches for _, _, tokens in batch) / number,
            "steps with prompts and decodes": sum(map(_is_mixed, batches)),
            "preemptions": self.preemptions.total(),
            "cached tokens": self.cached.total(),
        }


@dataclass(slots=True)
class ScheduleComparison:
    """Both sides' figures, how many requests are out of order, and what is beyond the tolerance."""

    tolerance: float
    num_requests: int = 0
    num_moved: int = 0
    ours: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)


def read_schedule(messages: Iterable[Captured], names: Mapping[str, str] | None = None) -> Schedule:
    """Return the schedule of a recording; `names` gives requests other ids, and leaves out those without one."""
    schedule = Schedule()
    begun: dict[Place, tuple[str, int]] = {}
    seen: dict[tuple[str, int], tuple[str, int]] = {}
    admitted: set[str] = set()
    for captured in messages:
        plan = message_of(captured, StepPlan) if kind_name(captured) == StepPlan.SCHEMA else None
        if plan is None:
            continue
        executor = executor_of(captured.subject)
        for new in plan.new:
            name = new.request_id if names is None else names.get(new.request_id)
            if name is None:
                continue
            choice, epoch = (name, new.index), (executor, plan.epoch)
            begun[executor, plan.epoch, new.sequence] = choice
            if choice not in seen:
                schedule.cached[name] += new.num_computed
            elif seen[choice] == epoch:
                schedule.preemptions[name] += 1
            seen[choice] = epoch
            if name not in admitted:
                admitted.add(name)
                schedule.admitted.append(name)
        runs = ((begun.get((executor, plan.epoch, run.sequence)), run.num_tokens) for run in plan.run)
        batch = tuple(sorted((*choice, number) for choice, number in runs if choice is not None))
        if batch:
            schedule.steps.setdefault(executor, []).append(batch)
    return schedule


def compare_schedules(ours: Schedule, other: Schedule, tolerance: float) -> ScheduleComparison:
    """Compare two schedules of the same requests, under the same names."""
    result = ScheduleComparison(tolerance, ours=ours.figures(), other=other.figures())
    ranks = {name: rank for rank, name in enumerate(other.admitted)}
    order = [ranks[name] for name in ours.admitted if name in ranks]
    result.num_requests, result.num_moved = len(order), len(order) - _longest_rise(order)
    result.differences += _order_difference(ours.admitted, other.admitted, result)
    result.differences += _figure_differences(result, ours, other)
    if tolerance == 0:
        result.differences += _step_differences(ours, other)
    return result


def _order_difference(ours: Sequence[str], other: Sequence[str], result: ScheduleComparison) -> Iterable[Difference]:
    if result.num_moved <= result.tolerance * result.num_requests:
        return
    rank = next((n for n, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), min(len(ours), len(other)))
    shown = (list(ours[rank : rank + MAX_NAMED]), list(other[rank : rank + MAX_NAMED]))
    yield Difference("", "schedule: order of admission", *shown, position=rank)


def _figure_differences(result: ScheduleComparison, ours: Schedule, other: Schedule) -> Iterable[Difference]:
    by_request = {"preemptions": (ours.preemptions, other.preemptions), "cached tokens": (ours.cached, other.cached)}
    for name, expected in result.ours.items():
        found = result.other[name]
        if abs(found - expected) > result.tolerance * max(expected, found):
            yield Difference("", f"schedule: {name}", round(expected, 4), round(found, 4))
        elif result.tolerance > 0:
            continue
        if name in by_request:
            yield from _request_differences(name, *by_request[name], tolerance=result.tolerance)


def _request_differences(
    name: str, ours: "Counter[str]", other: "Counter[str]", *, tolerance: float
) -> Iterable[Difference]:
    """Name the requests that differ: with a tolerance only the ones that differ most."""
    apart = sorted(
        (key for key in ours.keys() | other.keys() if ours[key] != other[key]),
        key=lambda key: (-abs(ours[key] - other[key]), key),
    )
    for key in apart[:MAX_NAMED] if tolerance else apart:
        yield Difference(key, f"schedule: {name}", ours[key], other[key])


def _step_differences(ours: Schedule, other: Schedule) -> Iterable[Difference]:
    """Yield each executor's first different step, counted from the first one of the recording."""
    for executor in sorted(ours.steps.keys() | other.steps.keys()):
        mine, theirs = ours.steps.get(executor, []), other.steps.get(executor, [])
        pairs = enumerate(zip(mine, theirs, strict=False))
        step = next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
        if step < max(len(mine), len(theirs)):
            shown = (_shown(mine, step), _shown(theirs, step))
            yield Difference("", f"schedule: batch of {executor}", *shown, position=step)


def _shown(steps: Sequence[Batch], step: int) -> Any:
    if step >= len(steps):
        return "no step"
    return [f"{name}[{index}] × {number}" for name, index, number in steps[step]]


def _is_mixed(batch: Batch) -> bool:
    return len({number > 1 for _, _, number in batch}) == 2


def _longest_rise(ranks: Iterable[int]) -> int:
    """Return the length of the longest increasing subsequence (patience sorting)."""
    tails: list[int] = []
    for rank in ranks:
        place = bisect_left(tails, rank)
        tails[place : place + 1] = [rank]
    return len(tails)


def as_rows(result: ScheduleComparison) -> list[str]:
    """Return the table for a terminal."""
    rule = "exact" if result.tolerance == 0 else f"within {result.tolerance:.0%}"
    lines = [f"{'schedule':32}{'expected':>12}{'found':>12}   ({rule})"]
    lines.append(f"{'requests out of order':32}{'':>12}{result.num_moved:12} of {result.num_requests}")
    for name, expected in result.ours.items():
        lines.append(f"{name:32}{expected:12.6g}{result.other[name]:12.6g}")
    return lines
