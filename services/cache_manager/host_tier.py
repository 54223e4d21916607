"""Which of an executor's host blocks hold what, and the copies that bring blocks there and back. Plain bookkeeping.

The host blocks are a second level behind the executor's own: what is evicted there is stored here, and loaded again
when a sequence begins with it. Host blocks are numbered from `num_blocks` on. A copy is done by the executor, before
anything else that this command leads to, and in order: so a slot may be filled anew behind the copy that reads it.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from schemas.cache import BlockCopy

MAX_PENDING_COPIES = 4096
"""So many copies one reply may hold; beyond, blocks are evicted for good and computed again."""


class HostTier:
    """Content of `num_host_blocks` host blocks by key, least recently used first, and the copies not yet heard of.

    The scheduler has heard of `num_heard` copies in this epoch, of `num_copies` when the tier begins.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, num_copies: int = 0) -> None:
        self.num_host_blocks = num_host_blocks
        self._free = list(reversed(range(num_blocks, num_blocks + num_host_blocks)))
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._copies: list[BlockCopy] = []
        self.num_heard = num_copies

    @property
    def num_used(self) -> int:
        """Host blocks that can be found."""
        return len(self._slots)

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """All copies that the scheduler has not heard of, in order."""
        return tuple(self._copies)

    def hear(self, num_copies: int) -> None:
        """Forget the copies that the scheduler has: so many of this epoch."""
        del self._copies[: max(0, num_copies - self.num_heard)]
        self.num_heard = max(self.num_heard, num_copies)

    def find(self, keys: Sequence[str]) -> list[str]:
        """Return the first of `keys` that are held, without a gap, and count them as just used."""
        found: list[str] = []
        for key in keys[: MAX_PENDING_COPIES - len(self._copies)]:
            if key not in self._slots:
                break
            found.append(key)
        for key in reversed(found):  # what comes first in a prefix is needed longest
            self._slots.move_to_end(key)
        return found

    def load(self, key: str, block: int) -> None:
        """Have a block filled with what is held by `key`, which stays held."""
        self._copies.append((self._slots[key], block))

    def store(self, key: str, block: int, spared: Collection[str] = ()) -> None:
        """Have a block kept that is about to be filled anew, in place of the least recently used but `spared` ones.

        Those must have been found just now. Nothing is kept when there is no room, or when the content is held already.
        """
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if len(self._copies) >= MAX_PENDING_COPIES or not self.num_host_blocks:
            return
        if not self._free:
            oldest = next(iter(self._slots))
            if oldest in spared:
                return
            self._free.append(self._slots.pop(oldest))
        slot = self._slots[key] = self._free.pop()
        self._copies.append((block, slot))

    def flush(self) -> int:
        """Forget what every host block contains; returns how many were held. Copies that are due stay due."""
        num_held = len(self._slots)
        self._free += self._slots.values()
        self._slots.clear()
        return num_held
