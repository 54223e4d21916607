"""How a sequence's next token is to be chosen follows from the request and the tokens so far, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine_core.batch import Penalties, Sampling
from engine_core.grammar import Grammar, Grammars
from engine_core.token_bytes import read_token_bytes
from schemas.sampling import SamplingParams
from services.executor.choosing import Choosing, mask_of

PROMPT = [1, 2, 3]


def sampling(params: SamplingParams, *generated: int, ends: tuple[int, ...] = ()) -> Sampling:
    return Choosing(params, ends).next_token([*PROMPT, *generated], len(PROMPT))


def test_without_options_the_logits_stay_as_they_are() -> None:
    assert sampling(SamplingParams(), 4, 5).is_plain


def test_penalties_tell_prompt_and_generated_tokens_apart() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    expected = Penalties(1.0, 0.5, 1.2, prompt=(1, 2, 3), generated=(4, 4))
    assert sampling(params, 4, 4).penalties == expected


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    params = SamplingParams(bad_words=((7,), (5, 6), (3, 4)))
    assert sampling(params).banned == (7,)
    assert sampling(params, 5).banned == (7, 6)
    assert sampling(params, 5, 9).banned == (7,)
    assert sampling(params, 3).banned == (7, 4)  # the 3 of the prompt did not count


def test_every_end_is_banned_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2)
    assert [sampling(params, *generated, ends=(2, 9, 2)).banned for generated in ((), (4,), (4, 4))] == [
        (2, 9),
        (2, 9),
        (),
    ]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_the_mask_holds_exactly_the_allowed_tokens(tokens: set[int]) -> None:
    mask = sampling(SamplingParams(allowed_token_ids=tuple(tokens))).allowed
    assert mask == mask_of(tuple(tokens))
    assert {8 * byte + bit for byte, value in enumerate(mask or b"") for bit in range(8) if value >> bit & 1} == tokens


@given(st.integers(0, 6))
def test_a_resumed_sequence_is_bound_as_if_it_had_never_stopped(split: int) -> None:
    grammars = Grammars(lambda: read_token_bytes(None))
    params = SamplingParams(grammar=LLMatcher.grammar_from_regex("[ab]{3}c{3}"), allowed_token_ids=tuple(b"abc"))
    text = list(b"abaccc")
    straight = Choosing(params, (), grammars.begin(params.grammar))
    masks = [straight.next_token([*PROMPT, *text[:count]], len(PROMPT)).allowed for count in range(len(text) + 1)]
    resumed = Choosing(params, (), grammars.begin(params.grammar))
    for count in range(split, len(text) + 1):
        known = [*PROMPT, *text[:count]]
        assert resumed.next_token(known, len(PROMPT)).allowed == masks[count]
        assert resumed.is_complete(known, len(PROMPT)) == (count == len(text))
    assert not any(masks[-1] or b"")  # complete: nothing may follow


def test_a_broken_grammar_is_known_and_allows_nothing() -> None:
    choosing = Choosing(SamplingParams(), (), Grammar(None))
    assert choosing.is_broken
    assert not any(choosing.next_token(PROMPT, 3).allowed or b"")
