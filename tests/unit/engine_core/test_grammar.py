"""A grammar's state follows from the tokens alone; broken, it allows nothing."""

from pathlib import Path

from llguidance import LLMatcher

from engine_core.grammar import NOTHING, Grammar, Grammars, GreedyTokenizer
from engine_core.token_bytes import TokenBytes, read_token_bytes

END = 256
REGEX = LLMatcher.grammar_from_regex("ab*c")


def tokens_of(mask: bytes) -> set[int]:
    return {8 * byte + bit for byte, value in enumerate(mask) for bit in range(8) if value >> bit & 1}


def grammars() -> Grammars:
    return Grammars(lambda: read_token_bytes(None))


def test_masks_follow_the_tokens_and_the_end_is_known() -> None:
    grammar = grammars().begin(REGEX)
    seen = []
    for text in (b"", b"a", b"ab"):
        grammar.advance(list(text))
        assert not grammar.is_complete
        seen.append(tokens_of(grammar.mask()))
    assert seen == [{ord("a")}, {ord("b"), ord("c")}, {ord("b"), ord("c")}]
    grammar.advance(list(b"abc"))
    assert grammar.is_complete
    assert not grammar.is_broken


def test_a_state_reached_at_once_is_the_same() -> None:
    both = grammars()
    first, second = both.begin(REGEX), both.begin(REGEX)
    for count in range(3):
        first.advance(list(b"abb")[: count + 1])
    second.advance(list(b"abb"))
    assert first.mask() == second.mask()


def test_an_end_is_allowed_where_the_text_may_end() -> None:
    grammar = grammars().begin(LLMatcher.grammar_from_regex("ab*"))
    grammar.advance(list(b"a"))
    assert tokens_of(grammar.mask()) == {ord("b"), END}
    grammar.advance([*b"a", END])
    assert grammar.is_complete


def test_what_cannot_be_followed_allows_nothing() -> None:
    broken = [grammars().begin(LLMatcher.grammar_from_regex("(")), Grammar(None), Grammars(_no_vocabulary).begin(REGEX)]
    left = grammars().begin(REGEX)
    left.advance(list(b"x"))
    for grammar in (*broken, left):
        assert grammar.is_broken
        assert not grammar.is_complete
        assert grammar.mask() == NOTHING
        grammar.advance(list(b"x"))


def _no_vocabulary() -> TokenBytes:
    return read_token_bytes(Path("/nowhere.gguf"))


def test_forced_text_is_cut_into_the_longest_tokens() -> None:
    vocabulary = TokenBytes((b"a", b"b", b"ab", b"<end>"), frozenset({3}), (3,))
    assert GreedyTokenizer(vocabulary)(b"abba?<end>ab") == [2, 1, 0, 2]
