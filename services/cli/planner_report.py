"""How the plans of a replayed planner compare with the recorded ones: in words, and as JSON. Pure."""

from dataclasses import dataclass, field
from typing import Any

from schemas.step import StepPlan


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """A plan that came out otherwise; None: the planner would not have planned then."""

    executor: str
    recorded: StepPlan
    replayed: StepPlan | None


@dataclass(slots=True)
class PlannerComparison:
    """How many plans were made again, and the first ones that differ."""

    num_plans: int = 0
    num_different: int = 0
    num_skipped: int = 0
    differences: list[PlanDifference] = field(default_factory=list)


def as_json(result: PlannerComparison) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "num_plans": result.num_plans,
        "num_different": result.num_different,
        "num_skipped": result.num_skipped,
        "differences": [
            {
                "executor": difference.executor,
                "recorded": _shown(difference.recorded),
                "replayed": _shown(difference.replayed),
            }
            for difference in result.differences
        ],
    }


def as_text(result: PlannerComparison) -> str:
    """Return the report for a terminal: the first difference whole, the verdict last."""
    lines: list[str] = []
    for difference in result.differences[:1]:
        place = f"step {difference.recorded.step} of epoch {difference.recorded.epoch} on {difference.executor}"
        lines.append(f"First different: {place}")
        lines += [f"    recorded {_shown(difference.recorded)}", f"    replayed {_shown(difference.replayed)}"]
    if result.num_skipped:
        lines.append(f"{result.num_skipped} plans were not made again: what came before them is not in the recording.")
    if result.num_different:
        lines.append(f"DIFFERENT: {result.num_different} of {result.num_plans} plans.")
    else:
        lines.append(f"EQUAL: {result.num_plans} plans.")
    return "\n".join(lines)


def _shown(plan: StepPlan | None) -> Any:
    return None if plan is None else plan.model_dump(mode="json", exclude_defaults=True)
