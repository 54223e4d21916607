"""An output that says its prompt again: as text, with logprobs, alone; and stop strings before min_tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.output import OutputChunk, TokenText
from schemas.step import TokenLogprob
from services.tokenizer.request_output import MAX_CHUNK_TOKENS, RequestOutput
from tests.unit.tokenizer.test_request_output import BYTES, END, drain, output_of, tokens

PROMPT = tuple(b"ab\xc3")
SCORES = tuple(TokenLogprob(logprob=-float(token), top=((token, -float(token)),)) for token in PROMPT[1:])


def text_of(chunks: list[OutputChunk]) -> str:
    return "".join(delta.text for chunk in chunks for delta in chunk.choices)


def prompt_of(chunks: list[OutputChunk]) -> list[TokenText]:
    return [token for chunk in chunks for delta in chunk.choices for token in delta.prompt]


def test_an_echoed_prompt_comes_first_and_a_character_may_lie_across_its_end() -> None:
    output = output_of(echo=True, prompt_token_ids=PROMPT)
    output.feed(tokens(b"\xa9!", finish_reason="length"))
    chunks = drain(output)
    assert text_of(chunks) == "abé!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_a_stop_string_does_not_match_in_the_prompt() -> None:
    output = output_of(echo=True, prompt_token_ids=tuple(b"stop st"), stop=("stop",))
    output.feed(tokens(b"op", finish_reason="length"))
    assert text_of(drain(output)) == "stop stop"


def test_prompt_logprobs_begin_with_a_token_that_has_none() -> None:
    output = output_of(echo=True, prompt_logprobs=True, prompt_token_ids=PROMPT)
    output.feed(tokens(b"x", prompt_logprobs=SCORES, finish_reason="length"))
    said = prompt_of(drain(output))
    assert [token.logprob for token in said] == [None, -98.0, -195.0]
    assert bytes(byte for token in said for byte in token.token_bytes) == bytes(PROMPT)
    assert said[1].top[0].token == "b"


def test_only_the_prompt_is_said_when_no_token_was_wanted() -> None:
    output = output_of(echo=True, prompt_logprobs=True, prompt_only=True, prompt_token_ids=PROMPT, num_logprobs=0)
    score = (TokenLogprob(logprob=-1.0),)
    output.feed(tokens([END], logprobs=score, prompt_logprobs=SCORES, finish_reason="stop", stop_token=True))  # type: ignore[arg-type]
    [chunk] = drain(output)
    [delta] = chunk.choices
    assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == ("ab", (), (), "length")
    assert (len(delta.prompt), chunk.usage and chunk.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize("echo", [True, False])
def test_an_end_that_is_not_shown_has_a_logprob_where_the_prompt_is_counted_along(echo: bool) -> None:
    output = output_of(echo=echo, prompt_token_ids=PROMPT if echo else (), num_logprobs=1)
    scores = tuple(TokenLogprob(logprob=-1.0, top=((token, -1.0),)) for token in (97, END))
    output.feed(tokens([97, END], logprobs=scores, finish_reason="stop", stop_token=True))  # type: ignore[arg-type]
    [delta] = drain(output)[0].choices
    entries = [(token.token, token.token_bytes, token.logprob) for token in delta.logprobs or ()]
    assert entries == [("a", (97,), -1.0), ("", (), -1.0)][: 2 if echo else 1]
    assert not echo or (delta.logprobs or ())[-1].top[0].token_id == END


def test_a_long_prompt_is_cut_into_chunks() -> None:
    prompt = (97,) * (3 * MAX_CHUNK_TOKENS)
    scores = (TokenLogprob(logprob=-1.0),) * (len(prompt) - 1)
    output = output_of(echo=True, prompt_logprobs=True, prompt_token_ids=prompt)
    output.feed(tokens(b"x", prompt_logprobs=scores, finish_reason="length"))
    chunks = drain(output)
    assert max(len(delta.prompt) for chunk in chunks for delta in chunk.choices) <= MAX_CHUNK_TOKENS
    assert len(prompt_of(chunks)) == len(prompt)
    assert text_of(chunks) == "a" * len(prompt) + "x"


@given(num_stored=st.integers(0, 5))
def test_a_second_writer_says_the_prompt_exactly_once(num_stored: int) -> None:
    prompt = (97,) * (2 * MAX_CHUNK_TOKENS)
    scores = (TokenLogprob(logprob=-1.0),) * (len(prompt) - 1)
    spec: dict[str, Any] = {"echo": True, "prompt_logprobs": True, "prompt_token_ids": prompt}
    news = tokens(b"xy", prompt_logprobs=scores, finish_reason="length")
    first = output_of(**spec)
    first.feed(news)
    stored = drain(first)[:num_stored]
    if stored and stored[-1].final:
        return
    second = output_of(2, **spec)
    second.restore(stored)
    second.feed(news)
    chunks = [*stored, *drain(second)]
    assert len(prompt_of(chunks)) == len(prompt)
    assert text_of(chunks) == "a" * len(prompt) + "xy"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "ab sto"), (4, "ab stop b")])
def test_a_stop_string_counts_after_min_tokens_only(min_tokens: int, text: str) -> None:
    stop = "b" if min_tokens < 2 else "p" if min_tokens == 2 else " bb"
    output: RequestOutput = output_of(stop=(stop,), min_tokens=min_tokens)
    output.feed(tokens("ab stop b", finish_reason="length"))
    assert text_of(drain(output)) == text
    assert BYTES.size == 257
