"""Finds stop strings in text that comes in pieces: one automaton for all of them, so their number costs nothing. Pure.

Aho & Corasick, “Efficient string matching” (CACM 18(6), 1975). The automaton's depth is the length of the longest
suffix that may still become a stop string, which is exactly what has to be held back.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    stop: str | None = None


class StopStrings:
    """The compiled stop strings of one request; immutable, shared by its choices."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Compile non-empty strings."""
        self._root = _Node(0)
        for stop in stops:
            node = self._root
            for character in stop:
                node = node.next.setdefault(character, _Node(node.depth + 1))
            node.stop = stop
        self._link()

    def _link(self) -> None:
        """Breadth first: each node but the root falls back to its longest proper suffix that is a prefix too."""
        waiting = deque([self._root])
        while waiting:
            node = waiting.popleft()
            for character, child in node.next.items():
                child.fallback = self._step(node.fallback, character)
                child.stop = child.stop or child.fallback.stop
                waiting.append(child)

    def _step(self, node: _Node | None, character: str) -> _Node:
        """Return the state after `character`; a state that cannot go on hands over to its fallback."""
        while node is not None:
            if (following := node.next.get(character)) is not None:
                return following
            node = node.fallback
        return self._root

    def matcher(self) -> "StopMatcher":
        """Return a matcher for one text."""
        return StopMatcher(self)

    def advance(self, node: _Node | None, character: str) -> _Node:
        """Return the state after one more character."""
        return self._step(node or self._root, character)


class StopMatcher:
    """Watches one choice's text."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node: _Node | None = None
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, include_stop: bool) -> str:
        """Take more text and return what may be shown now; after a match (`matched`) nothing more comes."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        for offset, character in enumerate(text):
            self._node = self._stops.advance(self._node, character)
            if self._node.stop is not None:
                self.matched = self._node.stop
                end = len(self._held) + offset + 1
                self._held = ""
                return pending[: end if include_stop else end - len(self.matched)]
        depth = self._node.depth if self._node is not None else 0
        cut = len(pending) - depth
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return what was held back: the text has ended, it is no stop string any more."""
        held, self._held = self._held, ""
        return held
