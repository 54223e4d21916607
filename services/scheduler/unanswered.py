"""Plans that an executor has not answered, kept so that a lost plan or result costs little. Pure: time is a parameter.

A plan may be sent again without harm: the executor runs it once, and answers a repeated one with the same result.
"""

from collections import OrderedDict

from schemas.step import StepPlan

MIN_PATIENCE_S = 0.75
"""No step is thought lost before; the least age at which a lost message is made up for."""
STEPS_OF_PATIENCE = 8
"""So many times the recent duration of a step may pass without an answer."""
WEIGHT = 0.2
"""Of the newest duration in the running average."""


class Unanswered:
    """The plans in flight of one epoch, and how long steps have taken lately."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, StepPlan] = OrderedDict()
        self._step_s = 0.0
        self._heard_s = 0.0
        self._num_repeats = 0

    def sent(self, plan: StepPlan, now_s: float) -> None:
        """Note a plan that is sent for the first time."""
        if not self._plans:
            self._heard_s = now_s
        self._plans[plan.step] = plan

    def answered(self, step: int, duration_s: float, now_s: float) -> None:
        """Note a result; those of earlier steps will not come any more."""
        self._step_s += WEIGHT * (duration_s - self._step_s)
        self._heard_s, self._num_repeats = now_s, 0
        while self._plans and next(iter(self._plans)) <= step:
            self._plans.popitem(last=False)

    def overdue(self, now_s: float) -> list[StepPlan]:
        """Return the plans to send again now: all of them, in order, after a silence that doubles each time."""
        patience_s = max(MIN_PATIENCE_S, STEPS_OF_PATIENCE * self._step_s) * 2**self._num_repeats
        if not self._plans or now_s - self._heard_s < patience_s:
            return []
        self._num_repeats += 1
        return list(self._plans.values())
