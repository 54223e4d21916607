"""The plan-ahead loop of one executor: what is sent when, and how every disagreement is noticed."""

import pytest

from schemas.cache import Acquire, CacheReply, Extend, Grant, OpenPool, Release
from schemas.step import Run, TokenLogprob
from services.scheduler.executor_state import OutOfStep
from tests.unit.scheduler.scheduling_traffic import Driven, request, result, sequence, token


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_as_many_plans_are_ahead_as_the_depth(depth: int) -> None:
    driven, item = Driven(depth=depth), sequence(prompt_len=5, max_tokens=20)
    driven.admit(item)
    plans = driven.plan()
    assert [plan.step for plan in plans] == list(range(1, depth + 1))
    assert plans[0].run == (Run(sequence=1, num_tokens=5),)
    assert all(plan.run == (Run(sequence=1),) for plan in plans[1:])
    assert driven.state.num_in_flight == depth
    progress = driven.state.apply_result(result(plans[0], token(item)))
    assert [(p.token, p.finish_reason) for p in progress] == [(9, None)]
    assert len(driven.plan()) == 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_is_planned_than_the_length_allows(depth: int) -> None:
    driven, item = Driven(depth=depth), sequence(prompt_len=5, max_tokens=2)
    driven.admit(item)
    while plans := driven.plan():
        for plan in plans:
            is_last = len(item.tokens) == 6
            driven.state.apply_result(result(plan, token(item, finish_reason="length" if is_last else None)))
    assert len(driven.plans) == 2
    assert (item.status, item.finish_reason, item.num_generated) == ("finished", "length", 2)


def test_nothing_to_do_sends_nothing() -> None:
    assert Driven().plan() == []


def test_data_and_blocks_are_sent_once() -> None:
    driven, item = Driven(depth=1, lookahead=2), sequence(prompt_len=5, max_tokens=20)
    driven.admit(item)
    sent: list[int] = []
    for number in range(12):
        [plan] = driven.plan()
        assert len(plan.new) == (number == 0)
        sent += [block for new in plan.new for block in new.blocks]
        sent += [block for run in plan.run for block in run.blocks]
        driven.state.apply_result(result(plan, token(item)))
        driven.ask()
    assert sent == item.blocks[: len(sent)]
    assert len(sent) == len(set(sent))


def test_dropped_sequence_is_told_once_and_its_late_tokens_are_ignored() -> None:
    driven, item = Driven(depth=1), sequence()
    driven.admit(item)
    [plan] = driven.plan()
    driven.state.remove(item)
    assert driven.state.apply_result(result(plan, token(item))) == []
    [dropping] = driven.plan()
    assert (dropping.drop, dropping.run) == ((1,), ())
    driven.state.apply_result(result(dropping))
    assert driven.plan() == []
    driven.ask()
    assert driven.pools.usage()["num_free_blocks"] == 64


def test_sequence_that_never_reached_the_executor_needs_no_drop() -> None:
    driven, item = Driven(), sequence()
    driven.admit(item)
    driven.state.remove(item)
    assert driven.plan() == []
    driven.state.remove(item)  # again: harmless
    assert driven.state.cache_operations() == [Release(sequence=1)]


def test_sequence_removed_while_its_blocks_are_asked_for_gives_them_back() -> None:
    driven, item = Driven(), sequence()
    driven.state.admit(item)
    reply = driven.answer(driven.state.cache_operations())
    driven.state.remove(item)
    assert driven.state.apply_grants(reply) == ([], [])
    driven.ask()
    assert driven.pools.usage()["num_free_blocks"] == 64


def test_finish_while_a_later_plan_is_in_flight_drops_nothing() -> None:
    driven, item = Driven(depth=2), sequence(max_tokens=20)
    driven.admit(item)
    first, second = driven.plan()
    driven.state.apply_result(result(first, token(item, finish_reason="stop", stop_token=True)))
    assert driven.state.apply_result(result(second, num_wasted=1)) == []
    assert driven.plan() == []
    assert (driven.state.num_active, driven.state.num_wasted, driven.state.num_in_flight) == (0, 1, 0)


def test_failed_sampling_ends_the_sequence_without_a_token() -> None:
    driven, item = Driven(depth=1), sequence()
    driven.admit(item)
    [plan] = driven.plan()
    [progress] = driven.state.apply_result(result(plan, token(item, -1, finish_reason="error")))
    assert (progress.token, progress.finish_reason, item.num_generated) == (None, "error", 0)


def test_logprobs_are_kept_with_the_tokens() -> None:
    driven, item = Driven(depth=1), sequence()
    driven.admit(item)
    [plan] = driven.plan()
    driven.state.apply_result(result(plan, token(item, logprob=TokenLogprob(logprob=-1.0))))
    assert item.logprobs == [TokenLogprob(logprob=-1.0)]


# ---- messages lost, doubled, reordered, stale


def test_doubled_and_late_results_change_nothing() -> None:
    driven, item = Driven(depth=2), sequence(max_tokens=20)
    driven.admit(item)
    first, second = driven.plan()
    answer = result(first, token(item))
    driven.state.apply_result(answer)
    assert driven.state.apply_result(answer) == []
    driven.state.apply_result(result(second, token(item)))
    assert driven.state.apply_result(result(second, token(item))) == []  # now nothing is in flight
    assert item.num_generated == 2


def test_lost_or_reordered_result_is_noticed_at_the_next_one() -> None:
    driven, item = Driven(depth=2), sequence(max_tokens=20)
    driven.admit(item)
    _, second = driven.plan()
    with pytest.raises(OutOfStep, match="step 1 was lost"):
        driven.state.apply_result(result(second, token(item, ahead=1)))


def test_token_for_another_position_is_noticed() -> None:
    driven, item = Driven(depth=1), sequence()
    driven.admit(item)
    [plan] = driven.plan()
    with pytest.raises(OutOfStep, match="position"):
        driven.state.apply_result(result(plan, token(item, ahead=1)))


def test_fault_of_the_executor_ends_the_epoch() -> None:
    driven = Driven()
    driven.admit(sequence())
    plan = driven.plan()[0]
    with pytest.raises(OutOfStep, match="expected step 1"):
        driven.state.apply_result(result(plan, fault="expected step 1"))


def test_oldest_unanswered_plan_has_a_time() -> None:
    driven = Driven()
    assert driven.state.waiting_since() is None
    driven.admit(sequence())
    driven.state.next_plan("scheduler-0", 5.0)
    driven.state.next_plan("scheduler-0", 6.0)
    assert driven.state.waiting_since() == 5.0


def test_abandoned_sequences_wait_with_all_known_tokens() -> None:
    driven, item, waiting = Driven(depth=2), sequence(max_tokens=20), sequence("w")
    driven.admit(item)
    first, _ = driven.plan()
    driven.state.apply_result(result(first, token(item)))
    driven.state.admit(waiting)
    assert driven.state.holds(item)
    assert driven.state.holds(waiting)
    assert driven.state.abandon() == [item, waiting]
    assert driven.state.num_active == 0
    for s in (item, waiting):
        assert (s.status, s.blocks, s.num_planned, s.num_pending, s.is_known) == ("waiting", [], 0, 0, False)
    assert item.tokens == [1, 2, 3, 4, 5, 9]
    again = Driven()
    again.admit(item)
    [new] = again.plan()[0].new
    assert (new.token_ids, new.prompt_len, new.max_len) == ((1, 2, 3, 4, 5, 9), 5, 25)


# ---- blocks


def test_first_command_opens_the_pool_with_the_leases_held() -> None:
    driven, item = Driven(), sequence()
    driven.admit(item)
    opening = driven.state.open_pool()
    assert isinstance(opening, OpenPool)
    assert (opening.num_blocks, opening.block_size, opening.incarnation) == (64, 4, "life-1")
    assert [(lease.sequence, lease.blocks) for lease in opening.leases] == [(1, tuple(item.blocks))]


def test_releases_are_asked_before_anything_that_needs_blocks() -> None:
    driven, first, second = Driven(), sequence("a"), sequence("b")
    driven.admit(first)
    driven.state.remove(first)
    driven.state.admit(second)
    assert [type(operation) for operation in driven.state.cache_operations()] == [Release, Acquire]


def test_refused_acquisition_waits_until_blocks_come_back() -> None:
    driven, big, small = (
        Driven(num_blocks=4),
        sequence("a", prompt_len=9, max_tokens=7),
        sequence("b", prompt_len=9, max_tokens=7),
    )
    driven.admit(big)
    driven.state.admit(small)
    assert driven.ask() == ([], [small])
    assert small.status == "waiting"
    assert not driven.state.may_admit
    driven.state.remove(big)
    assert driven.state.may_admit
    driven.admit(small)


def test_full_pool_is_not_asked_again_and_again() -> None:
    driven, a, b = (
        Driven(num_blocks=8, depth=1),
        sequence("a", prompt_len=9, max_tokens=20),
        sequence("b", prompt_len=9, max_tokens=20),
    )
    driven.state.admit(a)
    driven.state.admit(b)
    driven.ask()
    assert driven.state.num_active == 1 or driven.pools.usage()["num_free_blocks"] < 2
    for _ in range(10):
        driven.ask()
    num_commands = driven.num_commands
    for _ in range(10):
        driven.ask()
    assert driven.num_commands == num_commands


def test_short_of_blocks_the_latest_is_preempted_and_the_other_goes_on() -> None:
    driven = Driven(num_blocks=6, depth=1, lookahead=1)
    first = sequence("a", prompt_len=8, max_tokens=12, created_s=1.0)
    second = sequence("b", prompt_len=8, max_tokens=12, created_s=2.0)
    driven.admit(first, second)
    preempted: list[str] = []
    for _ in range(40):
        for plan in driven.plan():
            numbers = [run.sequence for run in plan.run]
            running = [s for s in (first, second) if driven.state.holds(s) and s.number in numbers]
            ends = {s.number: "length" if len(s.tokens) + 1 == s.max_len else None for s in running}
            driven.state.apply_result(result(plan, *(token(s, finish_reason=ends[s.number]) for s in running)))
        _, returned = driven.ask()
        preempted += [s.request.work.request_id for s in returned]
        if second.status == "waiting" and driven.state.may_admit:
            driven.state.admit(second)
    assert preempted[0] == "b"
    assert "a" not in preempted
    assert (first.num_generated, second.num_generated) == (12, 12)
    driven.ask()
    assert driven.pools.usage()["num_free_blocks"] == 6


def test_first_refusal_of_a_look_ahead_preempts_nobody() -> None:
    driven, item = Driven(depth=1, lookahead=1), sequence(prompt_len=4, max_tokens=20)
    driven.admit(item)
    item.blocks = item.blocks[:1]
    [plan] = driven.plan()
    driven.state.apply_result(result(plan, token(item)))
    refusal = CacheReply(grants=(Grant(sequence=1, granted=False),))
    assert driven.state.apply_grants(refusal) == ([], [])
    assert driven.state.cache_operations()[-1] == Extend(sequence=1, num_tokens=6, num_held=1)
    assert driven.state.apply_grants(refusal) == ([], [item])


def test_longest_sequence_is_limited_by_pool_and_model() -> None:
    driven = Driven(num_blocks=4)
    assert driven.state.max_len == 16


def test_choices_of_a_request_run_side_by_side() -> None:
    driven, both = Driven(depth=1), request(n=2).sequences
    driven.admit(*both)
    [plan] = driven.plan()
    assert [(new.sequence, new.index) for new in plan.new] == [(1, 0), (2, 1)]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_forced_tokens_take_no_step_of_their_own_and_are_computed_by_the_next_one(depth: int) -> None:
    driven, item = Driven(depth=depth), sequence(prompt_len=5, max_tokens=20)
    driven.admit(item)
    first, *others = driven.plan()
    [progress] = driven.state.apply_result(result(first, token(item, forced=(7, 8))))
    assert (progress.token, progress.forced, item.tokens[5:]) == (9, (7, 8), [9, 7, 8])
    assert (item.num_pending, item.num_to_run) == (len(others), 1)
    others += driven.plan()
    assert all(plan.run == (Run(sequence=1),) for plan in others)
    driven.state.apply_result(result(others[0], token(item)))
    assert item.num_computed == 8, "the prompt, and the sampled token with those that it forced"


def test_forced_tokens_end_a_sequence() -> None:
    driven, item = Driven(depth=2), sequence(prompt_len=5, max_tokens=3)
    driven.admit(item)
    [first, _] = driven.plan()
    ended = token(item, forced=(7, 2), finish_reason="stop", stop_token=True)
    [progress] = driven.state.apply_result(result(first, ended))
    assert (progress.forced, progress.finish_reason, progress.stop_token) == ((7, 2), "stop", True)
    assert (item.status, item.num_generated, driven.state.running) == ("finished", 3, {})
