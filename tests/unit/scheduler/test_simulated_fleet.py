"""Many executors under the real router and planner: they scale, prefixes stay, nothing is lost, nothing slows down."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from schemas.step import StepResult
from services.scheduler.planner import Limits
from tests.bench.simulation.fleet import FleetShape, Seat, SimulatedFleet
from tests.bench.simulation.report import as_text, report_of
from tests.bench.simulation.trace_shape import Trace, TraceShape

AT_ONCE = 1e6
"""Conversations a second."""


def run(num_executors: int, trace: TraceShape, **shape: Any) -> SimulatedFleet:
    fleet = SimulatedFleet(FleetShape(num_executors, **shape), Trace(trace))
    fleet.run()
    fleet.check_nothing_is_left()
    return fleet


def nine_tenths_s(fleet: SimulatedFleet) -> float:
    """When nine of ten requests had ended: afterwards a few long answers keep no executor busy."""
    ended = sorted(record.ended_s or 0.0 for record in fleet.records.values())
    return ended[len(ended) * 9 // 10]


def test_two_executors_do_twice_as_much_on_disjoint_prefixes() -> None:
    trace = TraceShape(
        480, AT_ONCE, num_system_prompts=2000, zipf=0.0, system_prompt_len=64, goes_on=0.0, answer_len=20
    )
    one, two = run(1, trace), run(2, trace)
    assert nine_tenths_s(one) / nine_tenths_s(two) >= 1.9


def test_conversations_stay_with_their_prefix() -> None:
    trace = TraceShape(250, 4.0, num_system_prompts=1000, zipf=0.0, goes_on=0.8, thinking_s=1.0, answer_len=15)
    report = report_of(run(4, trace))
    assert report["sticky_turns"] > 0.95, as_text(report)
    assert report["hit_rate"] > 0.6, as_text(report)


def test_one_prompt_that_all_share_does_not_draw_all_to_one_executor() -> None:
    fleet = run(8, TraceShape(128, 2000.0, num_system_prompts=1, goes_on=0.0, answer_len=20))
    assert fleet.most_active <= 2 * 128 / 8
    busy = sorted(executor.busy_s for executor in fleet.executors)
    assert busy[-1] < 3 * busy[0]


def test_nothing_is_lost_when_an_executor_dies_and_another_one_joins() -> None:
    fleet = SimulatedFleet(FleetShape(3, num_blocks=256), Trace(TraceShape(300, 40.0)))
    fleet.kill_at(1.0, "executor-0001")
    fleet.join_at(2.0, "executor-0009")
    fleet.run()
    fleet.check_nothing_is_left()
    assert {"executor-0000", "executor-0002", "executor-0009"} == {executor.name for executor in fleet.executors}
    assert all(executor.num_sampled > 0 for executor in fleet.executors)


def test_a_pool_far_too_small_serves_everyone_in_the_end() -> None:
    run(2, TraceShape(100, AT_ONCE, answer_len=120), num_blocks=48)


class Counted(SimulatedFleet):
    """Counts the lines that the scheduler's and the cache manager's code executes in each step."""

    def __init__(self, shape: FleetShape, trace: Trace) -> None:
        super().__init__(shape, trace)
        self.num_lines = 0
        self.lines_by_step: list[tuple[int, int]] = []

    def run(self) -> None:
        other = sys.gettrace()  # coverage, or a debugger
        sys.settrace(self._trace_calls)
        try:
            super().run()
        finally:
            sys.settrace(other)

    def _trace_calls(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        is_ours = "/services/scheduler/" in frame.f_code.co_filename or "/cache_manager/" in frame.f_code.co_filename
        return self._trace_lines if is_ours else None

    def _trace_lines(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self.num_lines += event == "line"
        return self._trace_lines

    def _hear(self, seat: Seat, result: StepResult) -> None:
        num_running, before = len(seat.state.running), self.num_lines
        super()._hear(seat, result)
        self.lines_by_step.append((num_running, self.num_lines - before))


def lines_per_step(max_num_seqs: int, num_requests: int) -> list[int]:
    """The lines of each step that ran as many sequences as there may be."""
    trace = TraceShape(num_requests, AT_ONCE, num_system_prompts=1000, goes_on=0.0, answer_len=12, system_prompt_len=32)
    shape = FleetShape(1, limits=Limits(max_num_seqs, 512, 32, target_itl_s=0.1, ageing_s=60.0))
    fleet = Counted(shape, Trace(trace))
    fleet.run()
    return [num_lines for num_running, num_lines in fleet.lines_by_step if num_running == max_num_seqs]


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def test_a_step_costs_the_same_however_many_requests_have_finished() -> None:
    lines = lines_per_step(8, 240)
    third = len(lines) // 3
    assert third > 50
    assert mean(lines[-third:]) < 1.15 * mean(lines[:third])


def test_a_step_costs_no_worse_than_linearly_in_running_sequences() -> None:
    few, many = mean(lines_per_step(4, 40)), mean(lines_per_step(48, 120))
    assert many < 12 * few
