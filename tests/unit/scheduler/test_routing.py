"""The quick choice of an executor is the same as looking at every one closely."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.book import cheapest
from services.scheduler.executor_state import ExecutorState
from services.scheduler.planner import Limits
from tests.unit.scheduler.scheduling_traffic import BLOCK_SIZE, capacity, sequence

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, lookahead_tokens=8)


def executor(number: int, weights: str, num_known: int, load: int) -> ExecutorState:
    published = capacity().model_copy(update={"weights_version": weights})
    state = ExecutorState(
        executor=f"executor-{number}", incarnation="1", epoch=1, capacity=published, limits=LIMITS, depth=2
    )
    state.known.remember(sequence(prompt_len=40).prefix_keys(state.naming)[:num_known])
    state.load = load
    return state


executors = st.lists(
    st.tuples(st.sampled_from(["", "other"]), st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=8
)


@settings(max_examples=120, deadline=None)
@given(executors, st.integers(1, 40))
def test_the_cheapest_executor_is_found(facts: list[tuple[str, int, int]], prompt_len: int) -> None:
    states = [executor(number, *fact) for number, fact in enumerate(facts)]
    item = sequence(prompt_len=prompt_len)

    def cost(state: ExecutorState) -> int:
        return state.load + state.num_to_compute(item)

    assert cost(cheapest(item, states)) == min(map(cost, states))


def test_blocks_of_other_weights_are_not_taken_for_the_same() -> None:
    same, other = executor(0, "a", 3, 0), executor(1, "b", 0, 0)
    other.known.remember(sequence(prompt_len=40).prefix_keys(same.naming))
    item = sequence(prompt_len=3 * BLOCK_SIZE + 1)
    assert (same.num_to_compute(item), other.num_to_compute(item)) == (1, 13)
