"""What a simulated run was like, as numbers and as text."""

from typing import Any

from services.bench.statistics import percentile
from tests.bench.simulation.fleet import Costs, SimulatedFleet

RUNNING_CLASSES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def report_of(fleet: SimulatedFleet) -> dict[str, Any]:
    """Return the figures; times in seconds of the simulation, costs in microseconds of this machine's CPU."""
    records = list(fleet.records.values())
    executors = fleet.executors
    begun = [record for record in records if record.first_token_s is not None]
    ttfts = sorted((record.first_token_s or 0.0) - record.arrived_s for record in begun)
    followers = [record for record in begun if record.turn > 1]
    prompt_tokens = sum(record.num_prompt_tokens for record in records)
    middle_s = _middle(fleet)
    busy = [executor.busy_s for executor in executors]
    return {
        "simulated_s": fleet.now_s,
        "num_requests": len(records),
        "num_output_tokens": sum(executor.num_sampled for executor in executors),
        "output_tokens_per_s": sum(executor.num_sampled for executor in executors) / fleet.now_s,
        "utilisation": sum(busy) / (len(executors) * fleet.now_s),
        "utilisation_while_requests_came": middle_s,
        "busiest_to_mean": max(busy) / (sum(busy) / len(busy)) if sum(busy) else 0.0,
        "most_active_sequences": fleet.most_active,
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "hit_rate": sum(record.num_cached for record in begun) / prompt_tokens,
        "sticky_turns": sum(record.is_sticky for record in followers) / max(1, len(followers)),
        "routing_us_per_request": fleet.measured.routing.mean_us,
        "planner_us_per_step": fleet.measured.planning.mean_us,
        "cache_us_per_command": fleet.measured.bookkeeping.mean_us,
        "planner_us_by_running": by_running(fleet.measured.step_by_running),
        "planner_us_per_sequence_by_tenth_finished": {
            tenth: round(costs.mean_us, 2) for tenth, costs in sorted(fleet.measured.step_by_finished.items())
        },
    }


def _middle(fleet: SimulatedFleet) -> float:
    """Return the busy share until the last request came: afterwards the fleet only runs empty."""
    last_s = max(record.arrived_s for record in fleet.records.values())
    return fleet.busy_until(last_s) / (len(fleet.executors) * last_s)


def by_running(costs: dict[int, Costs]) -> dict[int, float]:
    """Return the mean cost of a step by its number of running sequences, in classes of doubling size."""
    merged: dict[int, Costs] = {}
    for num_running, one in costs.items():
        group = next((size for size in RUNNING_CLASSES if num_running <= size), RUNNING_CLASSES[-1])
        into = merged.setdefault(group, Costs())
        into.num += one.num
        into.total_s += one.total_s
    return {size: round(one.mean_us, 1) for size, one in sorted(merged.items())}


def as_text(report: dict[str, Any]) -> str:
    """Return the figures, one to a line."""
    return "\n".join(f"  {name:42}{_shown(value)}" for name, value in report.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {number}" for key, number in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
