"""Plans and cache commands are cut where they would become too large, and nothing is lost by that."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.cache import Acquire, CacheCommand, Extend, Lease, OpenPool, Operation, Register, Release
from schemas.codec import encode
from schemas.step import StepPlan
from services.scheduler.message_sizes import cut, fitting, new_sequence_bytes
from services.scheduler.planner import Allocation
from tests.unit.scheduler.scheduling_traffic import sequence

KEY = "0123456789abcdef" * 2


def keys(number: int) -> tuple[str, ...]:
    return (KEY,) * number


OPERATIONS = st.one_of(
    st.builds(lambda n: Acquire(sequence=1, request_id="r" * 36, num_tokens=n, keys=keys(n)), st.integers(0, 300)),
    st.builds(lambda n: Register(sequence=1, first=0, keys=keys(n)), st.integers(0, 300)),
    st.builds(lambda n: Extend(sequence=n, num_tokens=9, num_held=1), st.integers(0, 9)),
    st.builds(lambda n: Release(sequence=n), st.integers(0, 9)),
)


@given(st.lists(OPERATIONS, max_size=40), st.integers(2000, 20_000))
def test_commands_keep_the_order_and_fit(operations: list[Operation], max_bytes: int) -> None:
    parts = cut(operations, max_bytes)
    assert [operation for part in parts for operation in part] == operations
    for part in parts:
        command = CacheCommand(scheduler="scheduler-0", executor="executor-0", epoch=9, operations=tuple(part))
        assert len(part) <= 1 or len(encode(command)) <= max_bytes + 200


def test_nothing_to_ask_is_one_command() -> None:
    assert cut([], 100) == [[]]


def test_opening_is_not_smaller_than_estimated() -> None:
    leases = tuple(Lease(sequence=n, blocks=tuple(range(9000, 9300)), keys=keys(300)) for n in range(3))
    opening = OpenPool(incarnation="i" * 32, num_blocks=99_999, block_size=16, leases=leases)
    size_bytes = len(encode(CacheCommand(scheduler="s", executor="e", epoch=1, operations=(opening,))))
    assert cut([opening, Release(sequence=1)], size_bytes) == [[opening], [Release(sequence=1)]]


def test_new_sequences_beyond_the_limit_wait_for_the_next_plan_and_known_ones_never_do() -> None:
    known = sequence("known", prompt_len=1000)
    known.is_known = True
    new = [sequence(f"new-{number}", prompt_len=1000) for number in range(3)]
    allocations = [Allocation(one, 1) for one in (new[0], known, new[1], new[2])]
    limit = 2 * new_sequence_bytes(new[0])
    assert [a.sequence for a in fitting(allocations, limit)] == [new[0], known, new[1]]
    assert fitting(allocations, 0) == allocations


def test_one_that_is_too_large_by_itself_is_not_left_out_for_ever() -> None:
    huge = sequence("huge", prompt_len=5000)
    assert [a.sequence for a in fitting([Allocation(huge, 1)], 100)] == [huge]


def test_estimate_is_no_less_than_the_message() -> None:
    one = sequence(prompt_len=3000)
    one.tokens = [123_456] * 3000
    one.blocks = list(range(10_000, 10_200))
    plan = StepPlan(scheduler="scheduler-0", epoch=1, step=1, new=(one.to_new_sequence(),))
    assert len(encode(plan)) <= new_sequence_bytes(one)
