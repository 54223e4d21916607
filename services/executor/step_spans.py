"""Spans of some of the engine's steps, linked to the requests that they served. Knows plans and results, no engine.

A step serves many requests and is part of none, so that each of its spans is a trace of its own. One step a second is
shown, and every one that ends a prompt; all would be hundreds a second.
"""

from collections import OrderedDict

from opentelemetry.trace import Link, SpanContext

from schemas.step import StepPlan
from services.executor.engine_thread import StepOutcome
from services.runtime.telemetry import Tracing, link_to

SHOWN_EVERY_S = 1.0
MAX_LINKS = 8
"""Steps that one sequence's span names: its first ones."""
MAX_PLANS_HELD = 64


class StepSpans:
    """What is known of the steps in flight, and which of them were shown for each sequence."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._epoch = 0
        self._plans: OrderedDict[int, StepPlan] = OrderedDict()
        self._parents: dict[int, str] = {}
        self._shown: dict[int, list[SpanContext]] = {}
        self._last_shown_s = 0.0

    def planned(self, plan: StepPlan) -> None:
        """Remember whom a step serves until its result is there."""
        if plan.epoch > self._epoch:
            self._epoch = plan.epoch
            self._plans.clear()
            self._parents.clear()
            self._shown.clear()
        self._plans[plan.step] = plan
        if len(self._plans) > MAX_PLANS_HELD:
            self._plans.popitem(last=False)
        for new in plan.new:
            if new.traceparent is not None:
                self._parents[new.sequence] = new.traceparent

    def stepped(self, outcome: StepOutcome, now_s: float) -> None:
        """Show the step if it is one of those that are shown; `now_s` is Unix time, at its end."""
        result = outcome.result
        plan = self._plans.pop(result.step, None)
        if plan is None or result.epoch != self._epoch or result.fault:
            return
        served = [run.sequence for run in plan.run if run.sequence in self._parents]
        if served and (outcome.phase != "decode" or now_s - self._last_shown_s >= SHOWN_EVERY_S):
            self._last_shown_s = now_s
            self._show(outcome, plan, served, now_s)

    def _show(self, outcome: StepOutcome, plan: StepPlan, served: list[int], now_s: float) -> None:
        span = self._tracing.start(
            "executor.step",
            start_s=now_s - outcome.result.duration_s,
            attributes={
                "natterjack.step": plan.step,
                "natterjack.epoch": plan.epoch,
                "natterjack.phase": outcome.phase,
                "natterjack.num_sequences": len(plan.run),
                "natterjack.num_tokens": sum(run.num_tokens for run in plan.run),
            },
            links=[link for sequence in served if (link := link_to(self._parents[sequence])) is not None],
        )
        span.end(int(now_s * 1e9))
        for sequence in served:
            shown = self._shown.setdefault(sequence, [])
            if len(shown) < MAX_LINKS:
                shown.append(span.get_span_context())

    def take_links(self, sequence: int) -> list[Link]:
        """Return the steps that were shown for a sequence, which has ended."""
        self._parents.pop(sequence, None)
        return [Link(context) for context in self._shown.pop(sequence, ())]
