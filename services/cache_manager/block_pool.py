"""One executor's KV blocks: which are free, which sequences hold which, and what they contain. Plain bookkeeping.

A full, computed block may be known by a key that names its content and everything before it; sequences with the same
prefix share it. A block that nobody holds stays findable until it is needed for something else, least recently used
first. Then a host tier may keep its content, from where it is loaded into another block. Invariant: a block is free
exactly when no lease names it, and a key names one block.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.cache_manager.host_tier import HostTier


@dataclass(slots=True)
class _Lease:
    """`num_shared` of the first blocks were found, the next `num_loaded` are loaded from the host tier."""

    blocks: list[int]
    num_shared: int = 0
    num_loaded: int = 0


class BlockPool:
    """Free list, leases and prefix index over `num_blocks` blocks of `block_size` tokens; `host` is a second level."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.host = HostTier(num_blocks, 0)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders: Counter[int] = Counter()
        self._leases: dict[int, _Lease] = {}
        self._block_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        return len(self._free)

    def blocks_of(self, sequence: int) -> tuple[int, ...]:
        """Return a sequence's blocks in order of position; empty when it holds none."""
        lease = self._leases.get(sequence)
        return tuple(lease.blocks) if lease is not None else ()

    def num_cached(self, sequence: int) -> int:
        """Return how many tokens were in the sequence's blocks when it got them, loaded ones included."""
        lease = self._leases.get(sequence)
        return (lease.num_shared + lease.num_loaded) * self.block_size if lease is not None else 0

    def num_loaded(self, sequence: int) -> int:
        """Return how many of these tokens are loaded from the host tier."""
        lease = self._leases.get(sequence)
        return lease.num_loaded * self.block_size if lease is not None else 0

    # ---- leases

    def acquire(self, sequence: int, num_tokens: int, keys: Sequence[str]) -> bool:
        """Lease blocks for a new sequence, sharing its longest known prefix; False when too few are free.

        What follows of the prefix in the host tier is loaded into blocks of the sequence's own. They cannot be found
        before they are registered: until then nobody knows that the copies were done.

        Asked again for a sequence that holds a lease, it only makes that lease long enough.
        """
        if sequence not in self._leases:
            shared = self._find(keys)
            num_idle = sum(self._holders[block] == 0 for block in shared)
            if self._num_blocks(num_tokens) - len(shared) > len(self._free) - num_idle:
                return False
            for block in shared:
                self._hold(block)
            num_shared = len(shared)
            stored = self.host.find(keys[num_shared : num_tokens // self.block_size])
            spared = frozenset(stored)
            for key in stored:
                block = self._take(spared)
                self.host.load(key, block)
                shared.append(block)
            self._leases[sequence] = _Lease(shared, num_shared, len(stored))
        return self.cover(sequence, num_tokens)

    def cover(self, sequence: int, num_tokens: int) -> bool:
        """Make the sequence's lease cover `num_tokens` tokens; False, and nothing changes, when too few are free."""
        lease = self._leases.get(sequence) or _Lease([])
        needed = self._num_blocks(num_tokens) - len(lease.blocks)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            lease.blocks.append(self._take())
        self._leases[sequence] = lease
        return True

    def release(self, sequence: int) -> None:
        """Give the sequence's blocks back, its last ones to be reused first; harmless when it holds none."""
        lease = self._leases.pop(sequence, None)
        for block in reversed(lease.blocks if lease is not None else ()):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def restore(self, leases: Iterable[tuple[int, Sequence[int], Sequence[str]]]) -> None:
        """Hold exactly `leases` (sequence, blocks, keys of the first blocks); what is findable stays so.

        Raises ValueError when they name blocks that the pool does not have, or one lease names a block twice.
        """
        restored = [(sequence, list(blocks), keys) for sequence, blocks, keys in leases]
        for _, blocks, _ in restored:
            if len(set(blocks)) != len(blocks) or not set(blocks) <= set(range(self.num_blocks)):
                raise ValueError("a lease names a block twice, or one that the pool does not have")
        for sequence in list(self._leases):
            self.release(sequence)
        for sequence, blocks, _ in restored:
            for block in blocks:
                self._hold(block)
            self._leases[sequence] = _Lease(blocks)
        for sequence, _, keys in restored:
            self.register(sequence, 0, keys)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, spared: Collection[str] = ()) -> int:
        """Hold the free block that is missed least; the host tier keeps its content, if not in place of `spared`."""
        block = next(iter(self._free))
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self.host.store(key, block, spared)
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._free.pop(block, None)

    # ---- prefix index

    def register(self, sequence: int, first: int, keys: Sequence[str]) -> None:
        """Make the sequence's blocks from number `first` on findable; a known content stays where it is."""
        for block, key in zip(self.blocks_of(sequence)[first:], keys, strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def flush(self) -> int:
        """Forget what every block contains, here and in the host tier; leases stay. Returns how many were findable."""
        num_findable = len(self._block_of) + self.host.flush()
        self._block_of.clear()
        self._key_of.clear()
        return num_findable

    def _find(self, keys: Sequence[str]) -> list[int]:
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found
