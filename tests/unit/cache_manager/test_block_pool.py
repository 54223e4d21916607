"""Every block is free or leased, shared only for the same content, and found again by its key, whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.cache_manager.block_pool import BlockPool
from services.cache_manager.host_tier import HostTier

NUM_BLOCKS = 12
NUM_HOST_BLOCKS = 5
BLOCK_SIZE = 4


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (0, 0)])
def test_lease_covers_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    assert pool.cover(1, num_tokens)
    assert len(pool.blocks_of(1)) == num_blocks


def test_covering_again_keeps_the_blocks() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.cover(1, 6)
    before = pool.blocks_of(1)
    assert pool.cover(1, 6)
    assert pool.cover(1, 2)
    assert pool.blocks_of(1) == before
    assert pool.cover(1, 9)
    assert pool.blocks_of(1)[:2] == before


def test_too_many_changes_nothing() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    assert not pool.cover(1, 9)
    assert (pool.num_free, pool.blocks_of(1)) == (2, ())


def test_release_twice_is_harmless() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.cover(1, 9)
    pool.release(1)
    pool.release(1)
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("blocks", [(0, 0), (NUM_BLOCKS,), (-1,)])
def test_leases_that_cannot_be_are_refused(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.cover(9, 4)
    with pytest.raises(ValueError, match="twice"):
        pool.restore([(1, blocks, ())])
    assert pool.num_free == NUM_BLOCKS - 1


def test_a_registered_prefix_is_shared_and_survives_its_first_owner() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    assert pool.acquire(1, 10, ("a", "b"))
    assert pool.num_cached(1) == 0
    pool.register(1, 0, ("a", "b"))
    assert pool.acquire(2, 10, ("a", "b"))
    assert pool.blocks_of(2)[:2] == pool.blocks_of(1)[:2]
    assert pool.blocks_of(2)[2] != pool.blocks_of(1)[2]
    assert (pool.num_cached(2), pool.num_free) == (8, NUM_BLOCKS - 4)
    first = pool.blocks_of(1)
    pool.release(1)
    pool.release(2)
    assert pool.num_free == NUM_BLOCKS
    assert pool.acquire(3, 10, ("a", "x"))
    assert (pool.blocks_of(3)[0], pool.num_cached(3)) == (first[0], 4)


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pool.acquire(1, 16, ("a", "b", "c", "d"))
    pool.register(1, 0, ("a", "b", "c", "d"))
    pool.release(1)
    pool.acquire(2, 4, ())
    pool.release(2)
    assert pool.acquire(3, 12, ("a", "b", "c"))
    assert pool.num_cached(3) == 12
    pool.release(3)
    assert pool.acquire(4, 8, ())  # takes the free one, and the tail of the prefix
    pool.release(4)
    assert pool.acquire(5, 16, ("a", "b", "c"))
    assert pool.num_cached(5) == 8


def test_a_prefix_that_fills_the_pool_is_refused_when_the_rest_does_not_fit() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    pool.acquire(1, 8, ())
    pool.register(1, 0, ("a", "b"))
    assert not pool.acquire(2, 16, ("a", "b"))
    assert pool.blocks_of(2) == ()
    pool.release(1)
    assert not pool.acquire(2, 16, ("a", "b"))
    assert pool.acquire(2, 12, ("a", "b"))
    assert pool.num_cached(2) == 8


def test_what_is_findable_outlives_a_change_of_owner() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.acquire(1, 8, ("a", "b"))
    pool.register(1, 0, ("a", "b"))
    held = pool.blocks_of(1)
    pool.restore([(7, held, ("a", "b")), (8, held[:1], ("a",))])
    assert pool.blocks_of(1) == ()
    assert pool.num_free == NUM_BLOCKS - 2
    assert pool.acquire(9, 9, ("a", "b"))
    assert pool.num_cached(9) == 8


def test_a_flush_forgets_contents_and_keeps_leases() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.acquire(1, 8, ("a", "b"))
    pool.register(1, 0, ("a", "b"))
    held = pool.blocks_of(1)
    assert pool.flush() == 2
    assert pool.blocks_of(1) == held
    pool.acquire(2, 9, ("a", "b"))
    assert pool.num_cached(2) == 0
    assert set(pool.blocks_of(2)).isdisjoint(held)
    pool.register(2, 0, ("a", "b"))
    pool.acquire(3, 9, ("a", "b"))
    assert pool.num_cached(3) == 8


def test_what_was_evicted_is_loaded_into_other_blocks() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pool.host = HostTier(4, 8)
    pool.acquire(1, 12, ("a", "b", "c"))
    pool.register(1, 0, ("a", "b", "c"))
    a, b, c = pool.blocks_of(1)
    pool.release(1)
    pool.acquire(2, 12, ())
    assert pool.host.copies == ((c, 4), (b, 5))
    pool.release(2)
    assert pool.acquire(3, 13, ("a", "b", "c"))
    assert (pool.num_cached(3), pool.num_loaded(3), pool.blocks_of(3)[0]) == (12, 8, a)
    assert pool.host.copies[2:] == ((5, pool.blocks_of(3)[1]), (4, pool.blocks_of(3)[2]))


def test_a_block_that_is_loaded_cannot_be_found_before_it_is_registered() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    pool.host = HostTier(8, 8)
    pool.host.store("a", 0)
    pool.acquire(1, 5, ("a",))
    pool.acquire(2, 5, ("a",))
    assert pool.num_loaded(1) == pool.num_loaded(2) == BLOCK_SIZE
    assert set(pool.blocks_of(1)).isdisjoint(pool.blocks_of(2))
    pool.register(2, 0, ("a",))
    pool.acquire(3, 5, ("a",))
    assert (pool.blocks_of(3)[0], pool.num_loaded(3)) == (pool.blocks_of(2)[0], 0)


def test_a_flush_forgets_host_blocks_too() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    pool.host = HostTier(8, 8)
    pool.host.store("a", 0)
    assert pool.flush() == 1
    pool.acquire(1, 5, ("a",))
    assert pool.num_cached(1) == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations on a small pool; a prefix is named by its letters, so equal keys mean equal content.

    Copies are done as an executor would: in order, each once, before anything else is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.pool.host = HostTier(NUM_BLOCKS, NUM_HOST_BLOCKS)
        self.num_copied = 0
        self.leases: dict[int, tuple[int, ...]] = {}
        self.prefixes: dict[int, list[str]] = {}
        self.content: dict[int, str] = {}

    sequences = st.integers(0, 5)
    prompts = st.text("ab", min_size=0, max_size=4)

    def copy(self) -> None:
        """Do the copies that are new, as an executor would."""
        host = self.pool.host
        for source, target in host.copies[self.num_copied - host.num_heard :]:
            assert min(source, target) < NUM_BLOCKS <= max(source, target) < NUM_BLOCKS + NUM_HOST_BLOCKS
            self.content[target] = self.content[source]
        self.num_copied = host.num_heard + len(host.copies)

    @rule()
    def hear(self) -> None:
        self.pool.host.hear(self.num_copied)
        assert self.pool.host.copies == ()

    @rule(sequence=sequences, prompt=prompts, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 5))
    def acquire(self, sequence: int, prompt: str, num_tokens: int) -> None:
        if sequence in self.leases:
            return
        keys = [prompt[: i + 1] for i in range(min(len(prompt), num_tokens // BLOCK_SIZE))]
        if self.pool.acquire(sequence, num_tokens, keys):
            self.copy()
            self.leases[sequence], self.prefixes[sequence] = self.pool.blocks_of(sequence), keys
            num_shared = self.pool.num_cached(sequence) // BLOCK_SIZE
            assert [self.content[block] for block in self.leases[sequence][:num_shared]] == keys[:num_shared]
            for block in self.leases[sequence][num_shared:]:
                self.content.pop(block, None)

    @rule(sequence=sequences, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 5))
    def cover(self, sequence: int, num_tokens: int) -> None:
        held, free = self.leases.get(sequence, ()), self.pool.num_free
        needed = max(0, -(-num_tokens // BLOCK_SIZE) - len(held))
        assert self.pool.cover(sequence, num_tokens) == (needed <= free)
        self.copy()
        now_held = self.pool.blocks_of(sequence)
        assert now_held[: len(held)] == held
        assert len(now_held) == len(held) + (needed if needed <= free else 0)
        for block in now_held[len(held) :]:
            self.content.pop(block, None)
        if needed <= free:
            self.leases[sequence] = now_held

    @rule(sequence=sequences)
    def register(self, sequence: int) -> None:
        keys = self.prefixes.get(sequence, [])
        self.pool.register(sequence, 0, keys)
        for block, key in zip(self.leases.get(sequence, ()), keys, strict=False):
            self.content[block] = key

    @rule(sequence=sequences)
    def release(self, sequence: int) -> None:
        self.pool.release(sequence)
        self.leases.pop(sequence, None)
        self.prefixes.pop(sequence, None)

    @rule()
    def flush(self) -> None:
        self.pool.flush()

    @rule()
    def change_owner(self) -> None:
        self.pool.restore((sequence, blocks, ()) for sequence, blocks in self.leases.items())

    @invariant()
    def what_can_be_found_is_there(self) -> None:
        for key, block in [*self.pool._block_of.items(), *self.pool.host._slots.items()]:
            assert self.content[block] == key

    @invariant()
    def every_host_block_is_free_or_found(self) -> None:
        host = self.pool.host
        assert sorted([*host._free, *host._slots.values()]) == list(range(NUM_BLOCKS, NUM_BLOCKS + NUM_HOST_BLOCKS))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        leased = {block for sequence in range(6) for block in self.pool.blocks_of(sequence)}
        assert sorted([*leased, *self.pool._free]) == list(range(NUM_BLOCKS))
        assert {block: self.pool._holders[block] for block in leased} == {
            block: sum(block in self.pool.blocks_of(sequence) for sequence in range(6)) for block in leased
        }


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
