"""Logprobs of known tokens: those that sampling the same tokens one by one would have told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core import echo, reference
from engine_core.batch import Row, Sampled, Sampling, Scoring
from engine_core.engine import EngineConfig
from engine_core.sampling import PIECE_TOKENS, pieces_of

PROMPT = (3, 14, 15, 92, 65, 35, 89)


def greedy(position: int) -> Sampling:
    return Sampling(position=position, seed=0, temperature=0.0, num_logprobs=2)


def test_a_scored_row_tells_what_its_prefixes_would_have(tiny_model_of: Callable[..., Path]) -> None:
    config = EngineConfig(model_path=tiny_model_of(), num_blocks=8, num_threads=1)
    engine = reference.load(config, lambda stage, fraction: None)
    row = Row(PROMPT, 0, (0,), 7, greedy(7), Scoring(PROMPT[1:], 2))
    scored = engine.score(row)
    for count, target in enumerate(scored.targets, start=1):
        [step] = engine.step([Row(PROMPT[:count], 0, (1,), 7, greedy(count))])
        assert step is not None
        assert target.token == PROMPT[count]
        assert target.top == step.top
    assert scored.sampled == engine.step([Row(PROMPT, 0, (2,), 7, greedy(7))])[0]


def test_a_chunk_of_a_prompt_is_scored_with_its_successor_and_samples_nothing(
    tiny_model_of: Callable[..., Path],
) -> None:
    config = EngineConfig(model_path=tiny_model_of(), num_blocks=8, num_threads=1)
    engine = reference.load(config, lambda stage, fraction: None)
    whole = engine.score(Row(PROMPT, 0, (0,), 7, None, Scoring(PROMPT[1:], 1)))
    first = engine.score(Row(PROMPT[:4], 0, (1,), 7, None, Scoring(PROMPT[1:5], 1)))
    rest = engine.score(Row(PROMPT[4:], 4, (1,), 7, None, Scoring(PROMPT[5:], 1)))
    assert first.targets + rest.targets == whole.targets
    assert (first.sampled, rest.sampled) == (None, None)


def test_the_echo_engine_is_certain_of_everything() -> None:
    engine = echo.load(EngineConfig(vocab_size=100, num_blocks=4), lambda stage, fraction: None)
    scored = engine.score(Row((5, 6), 0, (0,), 2, greedy(2), Scoring((6,), 1)))
    assert scored.targets == (Sampled(6, 0.0, ((6, 0.0),)),)
    assert scored.sampled == Sampled(5, 0.0, ((5, 0.0),))


@pytest.mark.parametrize("count", [1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS])
def test_pieces_join_to_the_row(count: int) -> None:
    row = Row(tuple(range(count)), 5, (), count)
    pieces = list(pieces_of(row))
    assert tuple(token for piece in pieces for token in piece.tokens) == row.tokens
    assert [piece.start for piece in pieces] == list(range(5, 5 + count, PIECE_TOKENS))
