"""Applies cache commands to the pools of all executors; pure, so that a test can drive it without a bus.

A pool belongs to one scheduler's epoch: commands of a lower epoch are refused, and a pool that is not known in the
command's epoch has to be opened first.
"""

from collections.abc import Collection
from dataclasses import dataclass

from schemas.cache import Acquire, CacheCommand, CacheReply, Extend, Grant, OpenPool, Operation, Register, Release
from schemas.errors import InvalidRequest, PoolUnknown, StaleEpoch
from services.cache_manager.block_pool import BlockPool
from services.cache_manager.host_tier import HostTier


@dataclass(slots=True)
class _OwnedPool:
    epoch: int
    incarnation: str
    pool: BlockPool


class Pools:
    """Every executor's pool."""

    def __init__(self) -> None:
        self._pools: dict[str, _OwnedPool] = {}
        self._num_flushes = 0

    def apply(self, command: CacheCommand) -> CacheReply:
        """Apply all operations in order and return their grants.

        Raises StaleEpoch for an owner that was replaced, PoolUnknown when the pool must be opened first (nothing is
        applied), InvalidRequest for leases that contradict each other.
        """
        owned = self._pools.get(command.executor)
        if owned is not None and command.epoch < owned.epoch:
            raise StaleEpoch(f"{command.executor} is owned in epoch {owned.epoch}, not {command.epoch}.")
        opening = command.operations[:1]
        if opening and isinstance(opening[0], OpenPool):
            owned = self._open(command, opening[0])
        if owned is None or owned.epoch != command.epoch:
            raise PoolUnknown(f"The pool of {command.executor} is not open in epoch {command.epoch}.")
        owned.pool.host.hear(command.num_copies)
        grants = [grant for operation in command.operations if (grant := _run(owned.pool, operation)) is not None]
        return CacheReply(
            grants=tuple(grants),
            num_free=owned.pool.num_free,
            num_blocks=owned.pool.num_blocks,
            num_flushes=self._num_flushes,
            copies=owned.pool.host.copies,
            num_copies=owned.pool.host.num_heard,
        )

    def _open(self, command: CacheCommand, opening: OpenPool) -> _OwnedPool:
        known = self._pools.get(command.executor)
        pool = BlockPool(opening.num_blocks, opening.block_size)
        if known is not None and _is_same_pool(known, opening):
            pool = known.pool  # the tensors are still there, and so is what they hold
        try:
            pool.restore((lease.sequence, lease.blocks, lease.keys) for lease in opening.leases)
        except ValueError as error:
            raise InvalidRequest(f"The pool of {command.executor} cannot be opened: {error}.") from None
        pool.host = HostTier(opening.num_blocks, opening.num_host_blocks, command.num_copies)
        owned = self._pools[command.executor] = _OwnedPool(command.epoch, opening.incarnation, pool)
        return owned

    def usage(self) -> dict[str, float]:
        """Return gauges over all pools."""
        total = sum(owned.pool.num_blocks for owned in self._pools.values())
        free = sum(owned.pool.num_free for owned in self._pools.values())
        return {"num_blocks": total, "num_free_blocks": free, "num_pools": len(self._pools)}

    def usage_by_executor(self) -> dict[tuple[str, ...], float]:
        """Return the leased part of each executor's blocks, 0 to 1."""
        pools = {name: owned.pool for name, owned in self._pools.items() if owned.pool.num_blocks}
        return {(name,): 1 - pool.num_free / pool.num_blocks for name, pool in pools.items()}

    def host_usage_by_executor(self) -> dict[tuple[str, ...], float]:
        """Return the part of each executor's host blocks that holds something, 0 to 1; 0 where there are none."""
        tiers = {name: owned.pool.host for name, owned in self._pools.items()}
        return {(name,): tier.num_used / max(1, tier.num_host_blocks) for name, tier in tiers.items()}

    def flush(self) -> dict[str, int]:
        """Forget what is findable, in all pools; leases stay. Returns the number of such blocks by executor."""
        self._num_flushes += 1
        return {name: owned.pool.flush() for name, owned in self._pools.items()}

    def forget(self, executor: str) -> None:
        """Drop the pool of an executor that left."""
        self._pools.pop(executor, None)

    def keep(self, executors: Collection[str]) -> None:
        """Drop every pool but those of `executors`."""
        self._pools = {name: owned for name, owned in self._pools.items() if name in executors}


def _is_same_pool(owned: _OwnedPool, opening: OpenPool) -> bool:
    shape = (owned.pool.num_blocks, owned.pool.block_size)
    return owned.incarnation == opening.incarnation and shape == (opening.num_blocks, opening.block_size)


def _run(pool: BlockPool, operation: Operation) -> Grant | None:
    match operation:
        case Acquire():
            granted = pool.acquire(operation.sequence, operation.num_tokens, operation.keys)
            return Grant(
                sequence=operation.sequence,
                granted=granted,
                blocks=pool.blocks_of(operation.sequence) if granted else (),
                num_cached=pool.num_cached(operation.sequence) if granted else 0,
                num_loaded=pool.num_loaded(operation.sequence) if granted else 0,
            )
        case Extend():
            granted = pool.cover(operation.sequence, operation.num_tokens)
            blocks = pool.blocks_of(operation.sequence)[operation.num_held :] if granted else ()
            return Grant(sequence=operation.sequence, granted=granted, blocks=blocks)
        case Register():
            pool.register(operation.sequence, operation.first, operation.keys)
        case Release():
            pool.release(operation.sequence)
    return None
