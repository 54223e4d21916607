"""What one executor's pool holds and is computing, as far as the scheduler has heard: a hint for choosing. Pure.

The cache manager decides what is shared; whoever believes this and is wrong only computes something again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KnownPrefixes:
    """Keys of blocks by what is known of them; `max_keys` bounds the memory, the least recently used go first."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.held: OrderedDict[str, None] = OrderedDict()
        self._computing: dict[str, int] = {}
        self._num_flushes = 0

    def remember(self, keys: Iterable[str]) -> None:
        """Note blocks that were computed or found."""
        for key in keys:
            self._computing.pop(key, None)
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > self._max_keys:
            self.held.popitem(last=False)

    def begin(self, keys: Iterable[str], sequence: int) -> None:
        """Note that a sequence will compute these blocks, unless another one does already."""
        for key in keys:
            self._computing.setdefault(key, sequence)

    def end(self, keys: Iterable[str], sequence: int) -> None:
        """Note that the sequence computes nothing more."""
        for key in keys:
            if self._computing.get(key) == sequence:
                del self._computing[key]

    def num_held(self, keys: Sequence[str]) -> int:
        """Return how many blocks from the beginning on are held."""
        return next((number for number, key in enumerate(keys) if key not in self.held), len(keys))

    def is_computing(self, keys: Sequence[str]) -> bool:
        """Tell whether the first block that is not held is being computed."""
        missing = next((key for key in keys if key not in self.held), None)
        return missing is not None and missing in self._computing

    def hear_of_flushes(self, num_flushes: int) -> None:
        """What was held before a flush is not any more."""
        if num_flushes != self._num_flushes:
            self._num_flushes = num_flushes
            self.held.clear()
