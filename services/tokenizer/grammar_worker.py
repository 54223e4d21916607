"""A process of its own that compiles grammars: whatever a client's grammar does to it, only it suffers.

Run as a script, isolated: it knows the standard library and llguidance, nothing of ours. On its standard input come
JSON lines: first the vocabulary, then one grammar at a time; every grammar is answered with one line. The parent ends
it by closing the input, or by killing it when it takes too long; the kernel limits its time and memory as well.
"""

import base64
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MAX_MEMORY_BYTES = 4 << 30
MAX_CPU_S = 2
"""Of one grammar; enforced by the kernel."""


class GreedyTokenizer:
    """The vocabulary as llguidance asks for it; how text is cut into tokens does not matter to what is asked here."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Iterable[int], ends: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = ends[0]
        self._ids = {text: token for token, text in enumerate(tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of single bytes."""
        return [self._ids[bytes([value])] for value in text if bytes([value]) in self._ids]


def tokenizer_of(tokens: list[bytes], special: Iterable[int], ends: list[int]) -> LLTokenizer:
    """Build llguidance's view of a vocabulary."""
    wrapper = TokenizerWrapper(GreedyTokenizer(tokens, special, ends))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends)


def refusal_of(tokenizer: LLTokenizer, grammar: str, patterns: Iterable[tuple[str, str]]) -> str:
    """Return why a grammar is no good, or nothing; `patterns` are (where, regular expression), to be named if wrong."""
    for where, pattern in patterns:
        if error := LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            return f"the {where}: {error}"
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        return "it accepts nothing"
    if not matcher.is_error():
        return ""
    cause, _, _ = str(matcher.get_error()).partition("\n<state>")
    return "it accepts nothing" if cause.startswith("NoExtension") else cause


def answers(lines: Iterator[bytes], limit: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield one answer per line: why a grammar is refused, and what CPU time it took; nothing for the vocabulary.

    `limit` is called before each grammar.
    """
    first = json.loads(next(lines))
    texts = [base64.b64decode(text) for text in first["tokens"]]
    tokenizer = tokenizer_of(texts, first["special"], first["ends"])
    yield {"refusal": "", "cpu_s": 0.0}
    for line in lines:
        asked = json.loads(line)
        began_s = time.process_time()
        limit()
        refusal = refusal_of(tokenizer, asked["grammar"], asked["patterns"])
        yield {"refusal": refusal, "cpu_s": time.process_time() - began_s}


def limit_cpu() -> None:
    """Allow this process the time of one more grammar."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + MAX_CPU_S, resource.RLIM_INFINITY))


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for answer in answers(iter(sys.stdin.buffer), limit_cpu):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
