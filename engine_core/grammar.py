"""Grammars that generated text must follow: which tokens may come next, and whether the text is complete.

Grammars are in llguidance's own form (https://github.com/guidance-ai/llguidance). A grammar's state follows from the
generated tokens alone, so it is the same wherever a sequence is continued.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine_core.token_bytes import TokenBytes

log = logging.getLogger(__name__)

MAX_CACHED = 64
NOTHING = b"\0"
"""The mask of no token."""


class Grammars:
    """Compiles grammars over one vocabulary, which is read on a thread of its own: that takes about a second."""

    def __init__(self, read_vocabulary: Callable[[], TokenBytes]) -> None:
        reader = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
        self._tokenizer: Future[LLTokenizer] = reader.submit(lambda: tokenizer_of(read_vocabulary()))
        self._cache: dict[str, LLMatcher] = {}
        reader.shutdown(wait=False)

    def begin(self, source: str) -> "Grammar":
        """Return the grammar `source` before any token; one that cannot be compiled is broken from the start."""
        try:
            matcher = self._cache.pop(source, None) or LLMatcher(self._tokenizer.result(), source, log_level=0)
        except Exception:
            log.exception("no vocabulary for grammars")
            return Grammar(None)
        self._cache[source] = matcher
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return Grammar(matcher.deep_copy())


class Grammar:
    """The state of one sequence's grammar. Broken, it allows nothing: never text that does not follow it."""

    def __init__(self, matcher: LLMatcher | None) -> None:
        self._matcher = matcher
        self._num_tokens = 0
        self._mask: bytes | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the grammar cannot be followed: it exceeds a limit, or the tokens do not belong to it."""
        return self._matcher is None or self._matcher.is_error()

    def advance(self, generated: Sequence[int]) -> None:
        """Go on behind `generated`, all tokens so far; those known already are not looked at again."""
        new = list(generated[self._num_tokens :])
        if new and self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
            self._mask = None
        self._num_tokens = len(generated)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can follow."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytes:
        """Return the tokens that may come next: bit t % 8 of byte t // 8."""
        if self._mask is None:
            self._mask = NOTHING
            if self._matcher is not None and not self._matcher.is_error():
                mask = bytes(self._matcher.compute_bitmask())
                self._mask = NOTHING if self._matcher.is_error() else mask
        return self._mask


def tokenizer_of(vocabulary: TokenBytes) -> LLTokenizer:
    """Build llguidance's view of a vocabulary."""
    wrapper = TokenizerWrapper(GreedyTokenizer(vocabulary))
    return LLTokenizer(wrapper, n_vocab=len(vocabulary.texts), eos_token=list(vocabulary.ends))


class GreedyTokenizer:
    """Cuts text into the longest tokens: which of several tokens to take for text that a grammar forces."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.tokens = vocabulary.texts
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0]
        self._ids = {text: token for token, text in enumerate(self.tokens) if token not in vocabulary.special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        return list(self._cut(text))

    def _cut(self, text: bytes) -> Iterator[int]:
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is not None:
                yield self._ids[text[start:end]]
            start = start + 1 if end is None else end  # some vocabularies lack single bytes
