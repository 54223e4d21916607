"""The whole path under a random schedule of messages, losses and restarts: right tokens, once, and every block back."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.cache_manager.pools import Pools
from services.scheduler.book import RequestBook
from tests.unit.scheduler.simulated_path import STEP_TIMEOUT, Faults, SimulatedPath

NO_FAULTS = Faults()
LOSSES = Faults(loss=0.02)
RESTARTS = Faults(executor_restart=0.002, cache_restart=0.002)
EVERYTHING = Faults(loss=0.01, executor_restart=0.002, cache_restart=0.002)

NUM_ACTIONS = 1500
MAX_ACTIONS_TO_FINISH = 60_000


def check_outputs(path: SimulatedPath) -> None:
    for request_id, job in path.jobs.items():
        written = path.written[request_id]
        assert written.is_final
        assert job.num_ended == 1
        if written.error is not None:
            assert job.may_fail, f"{request_id} failed with {written.error}"
            continue
        length = len(job.expected) if job.stop_at is None else min(job.stop_at, len(job.expected))
        assert written.tokens == [job.expected[:length]] * job.request.work.n


def check_nothing_is_left(path: SimulatedPath) -> None:
    for driver in path.drivers:
        assert driver.state is not None
        assert driver.state.num_active == 0
        assert driver.state.num_in_flight == 0
        owned = path.pools._pools.get(driver.name)
        if owned is not None and owned.epoch == driver.state.epoch:
            assert owned.pool.num_free == owned.pool.num_blocks, f"{driver.name} leaks blocks"
        if driver.sequences.epoch == driver.state.epoch:
            assert driver.sequences.running == {}
    assert (path.book.num_waiting, path.book.num_running) == (0, 0)


@pytest.mark.parametrize("faults", [NO_FAULTS, LOSSES, RESTARTS, EVERYTHING], ids=["calm", "loss", "restarts", "all"])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("num_executors", "num_blocks"), [(1, 12), (2, 16), (1, 200)])
def test_every_request_ends_once_with_its_tokens_and_no_block_is_lost(
    faults: Faults, depth: int, num_executors: int, num_blocks: int
) -> None:
    seed = hash((depth, num_executors, num_blocks, faults.loss, faults.executor_restart))
    path = SimulatedPath(seed, num_executors=num_executors, num_blocks=num_blocks, depth=depth, faults=faults)
    for _ in range(NUM_ACTIONS):
        path.act(arrival=0.04)
    path.finish(MAX_ACTIONS_TO_FINISH)
    check_outputs(path)
    check_nothing_is_left(path)
    assert len(path.jobs) > 20


@pytest.mark.parametrize("faults", [NO_FAULTS, EVERYTHING], ids=["calm", "all"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_tokens_that_a_grammar_forces_are_those_that_would_be_sampled(
    faults: Faults, depth: int, num_blocks: int
) -> None:
    path = SimulatedPath(
        depth + num_blocks, num_executors=1, num_blocks=num_blocks, depth=depth, faults=faults, lookahead=24
    )
    path.forcing = (0.7, 1.0)
    for _ in range(NUM_ACTIONS):
        path.act(arrival=0.04)
    path.finish(MAX_ACTIONS_TO_FINISH)
    check_outputs(path)
    check_nothing_is_left(path)
    assert path.num_forced > 40


@pytest.mark.parametrize("faults", [NO_FAULTS, LOSSES, RESTARTS, EVERYTHING], ids=["calm", "loss", "restarts", "all"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_host_blocks", [3, 60])
def test_blocks_that_come_back_from_host_memory_hold_what_they_held(
    faults: Faults, depth: int, num_host_blocks: int
) -> None:
    path = SimulatedPath(
        depth, num_executors=1, num_blocks=18, depth=depth, faults=faults, num_host_blocks=num_host_blocks
    )
    path.repeats = 0.7
    for _ in range(NUM_ACTIONS):
        path.act(arrival=0.04)
    path.finish(MAX_ACTIONS_TO_FINISH)
    check_outputs(path)
    check_nothing_is_left(path)
    assert path.num_loaded > 0


def test_a_tiny_pool_preempts_and_still_gives_the_right_tokens() -> None:
    path = SimulatedPath(5, num_executors=1, num_blocks=16, depth=2, faults=NO_FAULTS)
    for _ in range(NUM_ACTIONS):
        path.act(arrival=0.06)
    path.finish(MAX_ACTIONS_TO_FINISH)
    check_outputs(path)
    check_nothing_is_left(path)
    assert path.num_preempted > 3


def test_four_hundred_random_aborts_leave_everything_as_it_was() -> None:
    path = SimulatedPath(11, num_executors=2, num_blocks=24, depth=2, faults=NO_FAULTS)
    num_aborts = 0
    while num_aborts < 400:
        path.act(arrival=0.2)
        if path.random.random() < 0.2 and any(not request.is_finished for request in path.book):
            path.cancel()
            num_aborts += 1
    path.finish(MAX_ACTIONS_TO_FINISH)
    check_outputs(path)
    check_nothing_is_left(path)


def test_a_low_priority_is_served_while_better_ones_never_cease_to_come() -> None:
    ageing = 50.0
    path = SimulatedPath(3, num_executors=1, num_blocks=16, depth=2, faults=NO_FAULTS)
    path.limits = replace(path.limits, max_num_seqs=1, ageing_s=ageing)
    for driver in path.drivers:
        driver.limits = path.limits
    path.book = RequestBook(ageing)
    path.submit("low", max_tokens=3)
    others = 0
    while "low" not in path.written:
        others += 1
        path.submit("high", max_tokens=3)
        path.act(arrival=0.0)
        assert path.now < 40 * ageing, "starved"
    assert others > ageing


class PathMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, deliveries, restarts, losses of the books and flushes of the cache."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        num_executors=st.integers(1, 2),
        num_blocks=st.sampled_from([12, 16, 60]),
        depth=st.integers(1, 3),
    )
    def begin(self, seed: int, num_executors: int, num_blocks: int, depth: int) -> None:
        self.path = SimulatedPath(
            seed, num_executors=num_executors, num_blocks=num_blocks, depth=depth, faults=NO_FAULTS
        )

    @rule()
    def arrive(self) -> None:
        self.path.arrive()

    @rule()
    def cancel(self) -> None:
        self.path.cancel()

    @rule(choices=st.lists(st.integers(0, 1 << 8), min_size=1, max_size=12))
    def deliver(self, choices: list[int]) -> None:
        for choice in choices:
            if enabled := self.path.actions():
                enabled[choice % len(enabled)]()
                self.path.tick()

    @rule()
    def restart_an_executor(self) -> None:
        self.path.restart_executor()

    @rule()
    def restart_the_cache_manager(self) -> None:
        self.path.pools = Pools()

    @rule()
    def flush_the_cache(self) -> None:
        self.path.pools.flush()

    @rule()
    def notice(self) -> None:
        self.path.now += STEP_TIMEOUT // 4
        self.path.notice()

    @invariant()
    def no_block_has_two_owners(self) -> None:
        if hasattr(self, "path"):
            self.path.now += 1
            self.path.tick()
            self.path.check()

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.path.finish(MAX_ACTIONS_TO_FINISH)
            check_outputs(self.path)
            check_nothing_is_left(self.path)


PathMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestPathMachine = PathMachine.TestCase


@pytest.mark.slow
def test_thousands_of_steps_in_any_order() -> None:
    long = settings(max_examples=200, stateful_step_count=300, deadline=None)
    run_state_machine_as_test(PathMachine, settings=long)  # type: ignore[no-untyped-call]
