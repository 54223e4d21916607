"""Cache commands: who owns a pool, what must be opened first, and that repeating one does no harm."""

import pytest

from schemas.cache import Acquire, CacheCommand, CacheReply, Extend, Lease, OpenPool, Operation, Register, Release
from schemas.errors import InvalidRequest, PoolUnknown, StaleEpoch
from services.cache_manager.pools import Pools


def opening(*leases: Lease, num_blocks: int = 10, num_host_blocks: int = 0) -> OpenPool:
    return OpenPool(
        incarnation="life-1", num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=4, leases=leases
    )


def acquire(sequence: int, num_tokens: int, keys: str = "") -> Acquire:
    return Acquire(sequence=sequence, request_id="r", num_tokens=num_tokens, keys=tuple(keys))


def command(*operations: Operation, epoch: int = 1, executor: str = "executor-0", num_copies: int = 0) -> CacheCommand:
    return CacheCommand(
        scheduler="scheduler-0", executor=executor, epoch=epoch, operations=operations, num_copies=num_copies
    )


@pytest.fixture
def pools() -> Pools:
    pools = Pools()
    pools.apply(command(opening()))
    return pools


def test_unknown_pool_must_be_opened_first() -> None:
    pools = Pools()
    with pytest.raises(PoolUnknown):
        pools.apply(command(acquire(1, 4)))
    assert pools.usage() == {"num_blocks": 0, "num_free_blocks": 0, "num_pools": 0}


def test_grants_come_in_order_with_the_state_of_the_pool(pools: Pools) -> None:
    reply = pools.apply(command(acquire(1, 9), acquire(2, 100), Release(sequence=7), acquire(3, 4)))
    assert [(grant.sequence, grant.granted, len(grant.blocks)) for grant in reply.grants] == [
        (1, True, 3),
        (2, False, 0),
        (3, True, 1),
    ]
    assert (reply.num_free, reply.num_blocks) == (6, 10)


def test_extension_grants_only_what_is_new(pools: Pools) -> None:
    [first] = pools.apply(command(acquire(1, 4))).grants
    [more] = pools.apply(command(Extend(sequence=1, num_tokens=12, num_held=1))).grants
    assert len(more.blocks) == 2
    assert not set(first.blocks) & set(more.blocks)
    [refused] = pools.apply(command(Extend(sequence=1, num_tokens=100, num_held=3))).grants
    assert (refused.granted, refused.blocks) == (False, ())


def test_repeated_commands_give_the_same_answers(pools: Pools) -> None:
    def twice(*operations: Operation) -> CacheReply:
        first, second = pools.apply(command(*operations)), pools.apply(command(*operations))
        assert first == second
        return second

    twice(acquire(1, 9), acquire(2, 4))
    twice(Extend(sequence=1, num_tokens=13, num_held=3))
    twice(Release(sequence=1))
    assert twice(Release(sequence=2)).num_free == 10


def test_lower_epoch_is_refused_and_a_higher_one_must_open(pools: Pools) -> None:
    pools.apply(command(acquire(1, 9)))
    with pytest.raises(PoolUnknown):
        pools.apply(command(acquire(1, 4), epoch=2))
    assert pools.apply(command(opening(), epoch=2)).num_free == 10
    with pytest.raises(StaleEpoch):
        pools.apply(command(Release(sequence=1), epoch=1))
    with pytest.raises(StaleEpoch):
        pools.apply(command(opening(), epoch=1))


def test_opening_holds_exactly_the_leases_named() -> None:
    pools = Pools()
    lease = Lease(sequence=4, blocks=(3, 7))
    reply = pools.apply(command(opening(lease), Extend(sequence=4, num_tokens=12, num_held=2), acquire(5, 28)))
    assert [len(grant.blocks) for grant in reply.grants] == [1, 7]
    assert not {3, 7} & {block for grant in reply.grants for block in grant.blocks}
    assert pools.apply(command(opening(lease))).num_free == 8


def test_leases_that_contradict_each_other_are_refused(pools: Pools) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        pools.apply(command(opening(Lease(sequence=1, blocks=(0, 0))), epoch=2))
    assert pools.apply(command(epoch=1)).num_free == 10  # the old pool is as it was


def test_executors_are_kept_apart_and_forgotten(pools: Pools) -> None:
    pools.apply(command(opening(num_blocks=5), acquire(1, 4), executor="executor-1"))
    assert pools.usage() == {"num_blocks": 15, "num_free_blocks": 14, "num_pools": 2}
    pools.keep({"executor-1"})
    assert pools.usage()["num_pools"] == 1
    pools.forget("executor-1")
    pools.forget("executor-1")
    with pytest.raises(PoolUnknown):
        pools.apply(command(Release(sequence=1), executor="executor-1"))


def evicted(pools: Pools) -> CacheReply:
    """Have a prefix of two blocks computed in a pool of three, and taken for something else."""
    first = (acquire(1, 8, "ab"), Register(sequence=1, first=0, keys=("a", "b")), Release(sequence=1))
    pools.apply(command(opening(num_blocks=3, num_host_blocks=4), *first))
    return pools.apply(command(acquire(2, 12), Release(sequence=2)))


def test_a_lost_reply_loses_no_copy() -> None:
    pools = Pools()
    stored = evicted(pools)
    assert (stored.num_copies, len(stored.copies)) == (0, 2)
    loaded = pools.apply(command(acquire(3, 9, "ab"), num_copies=2))
    assert ([grant.num_loaded for grant in loaded.grants], loaded.num_copies, len(loaded.copies)) == ([8], 2, 2)
    assert pools.apply(command(acquire(3, 9, "ab"), num_copies=2)) == loaded
    assert pools.apply(command(num_copies=4)).copies == ()


def test_opening_a_pool_forgets_what_its_host_blocks_hold() -> None:
    """Nobody knows which copies the executor has done."""
    pools = Pools()
    evicted(pools)
    reply = pools.apply(command(opening(num_blocks=3, num_host_blocks=4), acquire(3, 9, "ab"), epoch=2, num_copies=9))
    assert ([grant.num_cached for grant in reply.grants], reply.num_copies, reply.copies) == ([0], 9, ())


def test_the_use_of_host_blocks_is_told(pools: Pools) -> None:
    assert pools.host_usage_by_executor() == {("executor-0",): 0.0}
    evicted(pools)
    assert pools.host_usage_by_executor() == {("executor-0",): 0.5}
