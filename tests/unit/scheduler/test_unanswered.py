"""When plans are sent again."""

from schemas.step import StepPlan
from services.scheduler.unanswered import MIN_PATIENCE_S, STEPS_OF_PATIENCE, Unanswered


def plan(step: int) -> StepPlan:
    return StepPlan(scheduler="scheduler-0", epoch=1, step=step)


def test_nothing_is_overdue_without_plans_or_before_its_time() -> None:
    plans = Unanswered()
    assert plans.overdue(1e9) == []
    plans.sent(plan(1), 100.0)
    assert plans.overdue(100.0 + MIN_PATIENCE_S / 2) == []


def test_everything_unanswered_is_sent_again_after_pauses_that_double() -> None:
    plans = Unanswered()
    plans.sent(plan(1), 0.0)
    plans.sent(plan(2), 0.1)
    assert plans.overdue(MIN_PATIENCE_S) == [plan(1), plan(2)]
    assert plans.overdue(1.5 * MIN_PATIENCE_S) == []
    assert plans.overdue(2 * MIN_PATIENCE_S) == [plan(1), plan(2)]
    assert plans.overdue(3 * MIN_PATIENCE_S) == []


def test_answer_takes_its_plan_away_and_begins_the_wait_anew() -> None:
    plans = Unanswered()
    plans.sent(plan(1), 0.0)
    plans.sent(plan(2), 0.0)
    plans.answered(1, 0.01, MIN_PATIENCE_S)
    assert plans.overdue(1.5 * MIN_PATIENCE_S) == []
    assert plans.overdue(2 * MIN_PATIENCE_S) == [plan(2)]
    plans.answered(2, 0.01, 2.5 * MIN_PATIENCE_S)
    assert plans.overdue(1e9) == []


def test_slow_steps_are_waited_for() -> None:
    plans = Unanswered()
    for step in range(1, 30):
        plans.sent(plan(step), step)
        plans.answered(step, 2.0, step + 1.0)
    plans.sent(plan(30), 30.0)
    assert plans.overdue(30.0 + 0.9 * STEPS_OF_PATIENCE * 2.0) == []
    assert plans.overdue(30.0 + 1.1 * STEPS_OF_PATIENCE * 2.0) == [plan(30)]
