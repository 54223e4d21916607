"""What one step runs: decodes first, prompts in chunks, never more than the budget or the blocks."""

import pytest

from services.scheduler.planner import Limits, plan_step, rank_of, to_extend, victim
from services.scheduler.requests import Sequence
from tests.unit.scheduler.scheduling_traffic import sequence

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=10, lookahead_tokens=8)


def running(
    request_id: str, *, prompt_len: int = 5, num_blocks: int = 10, num_planned: int = 0, **changes: object
) -> Sequence:
    item = sequence(request_id, prompt_len=prompt_len, **changes)
    item.blocks = list(range(num_blocks))
    item.num_planned = num_planned
    return item


def decoding(request_id: str, **changes: object) -> Sequence:
    item = running(request_id, **changes)
    item.plan(item.prompt_len)
    return item


def shares(items: list[Sequence], limits: Limits = LIMITS) -> list[tuple[str, int]]:
    return [(a.sequence.request.work.request_id, a.num_tokens) for a in plan_step(items, 4, limits)]


def test_decodes_come_before_prompts_whatever_their_rank() -> None:
    items = [running("first", priority="high"), decoding("second", priority="low")]
    assert shares(items) == [("second", 1), ("first", 5)]


def test_prompt_is_cut_to_what_is_left_of_the_budget() -> None:
    items = [decoding("a"), running("b", prompt_len=30), running("c")]
    assert shares(items) == [("a", 1), ("b", 9)]


def test_chunks_go_on_until_the_prompt_is_done() -> None:
    item = running("a", prompt_len=23)
    sizes = []
    while not item.num_pending:
        [(_, size)] = shares([item])
        item.plan(size)
        sizes.append(size)
    assert sizes == [10, 10, 3]


def test_prompts_are_served_by_rank() -> None:
    items = [
        running("late", created_s=2.0),
        running("early", created_s=1.0),
        running("high", created_s=3.0, priority="high"),
    ]
    assert [name for name, _ in shares(items)] == ["high", "early"]


def test_nothing_is_run_that_the_blocks_do_not_cover() -> None:
    assert shares([running("a", prompt_len=9, num_blocks=2)]) == [("a", 8)]
    assert shares([decoding("b", prompt_len=8, num_blocks=2)]) == []


def test_full_sequence_has_nothing_left_to_run() -> None:
    item = decoding("a", prompt_len=5, max_tokens=2)
    assert shares([item]) == [("a", 1)]
    item.plan(1)
    assert shares([item]) == []


def test_more_decodes_than_budget_leave_the_last_by_rank_out() -> None:
    items = [decoding(f"{number:02d}") for number in range(12)]
    assert shares(items) == [(f"{number:02d}", 1) for number in range(10)]


def test_beside_decodes_prompts_get_what_the_target_leaves() -> None:
    items = [decoding("a"), running("b", prompt_len=30), running("c", prompt_len=30)]
    allocations = plan_step(items, 4, LIMITS, max_prompt_tokens=4)
    assert [(a.sequence.request.work.request_id, a.num_tokens) for a in allocations] == [("a", 1), ("b", 4)]


def test_without_decodes_nobody_waits_and_prompts_get_the_whole_budget() -> None:
    allocations = plan_step([running("b", prompt_len=30)], 4, LIMITS, max_prompt_tokens=4)
    assert [a.num_tokens for a in allocations] == [10]


def ranked(items: list[Sequence], ageing_s: float) -> list[str]:
    return [i.request.work.request_id for i in sorted(items, key=lambda item: rank_of(item, ageing_s))]


def test_rank_is_priority_then_arrival_then_name() -> None:
    items = [
        sequence("d", priority="low"),
        sequence("c", created_s=2.0),
        sequence("b", created_s=1.0),
        sequence("a", created_s=1.0),
        sequence("e", created_s=9.0, priority="high"),
    ]
    assert ranked(items, 0.0) == ["e", "a", "b", "c", "d"]
    assert ranked(items, 60.0) == ["e", "a", "b", "c", "d"]


@pytest.mark.parametrize(("low_waits_s", "order"), [(119.0, ["high", "low"]), (121.0, ["low", "high"])])
def test_a_class_is_worth_so_much_waiting(low_waits_s: float, order: list[str]) -> None:
    items = [sequence("low", priority="low"), sequence("high", priority="high", created_s=low_waits_s)]
    assert ranked(items, 60.0) == order
    assert ranked(items, 0.0) == ["high", "low"]


def test_lease_is_extended_before_it_is_needed() -> None:
    assert to_extend([running("a", prompt_len=5, num_blocks=3)], 4, LIMITS) == []
    short = running("b", prompt_len=5, num_blocks=2)
    assert to_extend([short], 4, LIMITS) == [short]
    complete = running("c", prompt_len=5, num_blocks=2, max_tokens=3)
    assert to_extend([complete], 4, LIMITS) == []


def test_victim_is_the_lowest_priority_and_of_those_the_latest() -> None:
    items = [
        sequence("low-early", priority="low"),
        sequence("low-late", priority="low", created_s=1.0),
        sequence("high", created_s=9.0, priority="high"),
    ]
    chosen = victim(items, LIMITS)
    assert chosen is items[1]
    assert victim([], LIMITS) is None
