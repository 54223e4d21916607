"""Invariant 3, bit for bit: a sequence's logits are the same alone or among others, and however it is chunked."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.layers.row_tiles import TILE_ROWS, rows_agree
from engine_core.reference import ReferenceEngine, load

BLOCKS_PER_SEQUENCE = 8
BLOCK_SIZE = 16
NUM_SEQUENCES = 17
Tokens = tuple[int, ...]


def load_engine(path: Path, block_size: int = BLOCK_SIZE, num_threads: int = 2) -> ReferenceEngine:
    num_blocks = NUM_SEQUENCES * BLOCKS_PER_SEQUENCE * BLOCK_SIZE // block_size
    config = EngineConfig(model_path=path, block_size=block_size, num_blocks=num_blocks, num_threads=num_threads)
    return load(config, lambda stage, fraction: None)


class SequenceFeeder:
    """One sequence in an engine: its tokens, and a block table that no other place shares."""

    def __init__(self, engine: ReferenceEngine, tokens: Tokens, place: int) -> None:
        self.tokens = tokens
        per_sequence = engine.info.num_blocks // NUM_SEQUENCES
        blocks = list(range(place * per_sequence, (place + 1) * per_sequence))
        random.Random(place).shuffle(blocks)
        self.blocks = tuple(blocks)

    def row(self, start: int, end: int) -> Row:
        sampling = Sampling(position=end, seed=0)
        return Row(self.tokens[start:end], start, self.blocks, len(self.tokens), sampling)


@pytest.fixture(
    scope="module",
    params=["awkward sizes", "one KV head, head of its own", "several tiles wide"],
)
def engine(request: pytest.FixtureRequest, tiny_model_of: Callable[..., Path]) -> ReferenceEngine:
    if request.param == "awkward sizes":
        return load_engine(tiny_model_of())
    if request.param == "one KV head, head of its own":
        return load_engine(tiny_model_of(hidden=36, heads=3, kv_heads=1, head_dim=10, inner=50, tied=False))
    return load_engine(tiny_model_of(hidden=288, heads=8, kv_heads=8, head_dim=36, inner=3000, vocab=3001))


def random_tokens(engine: ReferenceEngine, count: int, seed: int) -> Tokens:
    source = random.Random(seed)
    return tuple(source.randrange(engine.info.vocab_size) for _ in range(count))


def logits_in_chunks(engine: ReferenceEngine, tokens: Tokens, bounds: Sequence[int], place: int = 0) -> torch.Tensor:
    """The logits after the last chunk; `bounds` are where chunks begin and end."""
    feeder = SequenceFeeder(engine, tokens, place)
    return [engine.logits([feeder.row(start, end)]) for start, end in pairwise(bounds)][-1][0]


@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_logits_are_bitwise_the_same_however_the_prompt_is_chunked(engine, chunk):
    tokens = random_tokens(engine, 50, seed=1)
    whole = logits_in_chunks(engine, tokens, (0, 50))
    bounds = (*range(0, 50, chunk), 50)
    assert torch.equal(logits_in_chunks(engine, tokens, bounds, place=3), whole)


@pytest.mark.parametrize("num_rows", [2, 7, 16, 17])
def test_prompts_give_bitwise_the_same_logits_alone_and_among_others(engine, num_rows):
    prompts = [random_tokens(engine, 5 + 11 * index % 40, seed=index) for index in range(num_rows)]
    alone = [logits_in_chunks(engine, prompt, (0, len(prompt))) for prompt in prompts]
    feeders = [SequenceFeeder(engine, prompt, place) for place, prompt in enumerate(prompts)]
    together = engine.logits([feeder.row(0, len(feeder.tokens)) for feeder in feeders])
    assert torch.equal(together, torch.stack(alone))
    reversed_rows = engine.logits([feeder.row(0, len(feeder.tokens)) for feeder in feeders[::-1]])
    assert torch.equal(reversed_rows.flip(0), together)


@pytest.mark.parametrize("num_rows", [2, 7, 16, 17])
def test_decoding_gives_bitwise_the_same_logits_alone_and_among_others(engine, num_rows):
    lengths = [3 + 7 * index % 60 for index in range(num_rows)]
    prompts = [random_tokens(engine, length, seed=100 + length) for length in lengths]
    feeders = [SequenceFeeder(engine, prompt, place) for place, prompt in enumerate(prompts)]
    engine.logits([feeder.row(0, len(feeder.tokens) - 1) for feeder in feeders])
    last = [feeder.row(len(feeder.tokens) - 1, len(feeder.tokens)) for feeder in feeders]
    together = engine.logits(last)
    assert torch.equal(together, torch.cat([engine.logits([row]) for row in last]))


def test_the_default_model_gives_the_same_bits_alone_in_chunks_among_others_and_decoding(model_path):
    engine = load_engine(model_path)
    prompts = [random_tokens(engine, 4 + 9 * index % 31, seed=index) for index in range(NUM_SEQUENCES)]
    alone = torch.stack([logits_in_chunks(engine, prompt, (0, len(prompt))) for prompt in prompts])
    feeders = [SequenceFeeder(engine, prompt, place) for place, prompt in enumerate(prompts)]
    assert torch.equal(engine.logits([feeder.row(0, len(feeder.tokens)) for feeder in feeders]), alone)
    assert torch.equal(
        engine.logits([feeder.row(len(feeder.tokens) - 1, len(feeder.tokens)) for feeder in feeders]), alone
    )
    for place, chunk in ((1, 1), (3, 16), (3, 17)):
        length = len(prompts[place])
        assert torch.equal(logits_in_chunks(engine, prompts[place], (*range(0, length, chunk), length)), alone[place])


def test_prefill_and_decode_rows_mixed_in_one_step_do_not_touch_each_other(engine):
    decoding = SequenceFeeder(engine, random_tokens(engine, 40, seed=5), 0)
    whole = logits_in_chunks(engine, decoding.tokens, (0, 40), place=1)
    engine.logits([decoding.row(0, 39)])
    chunk = replace(SequenceFeeder(engine, random_tokens(engine, 33, seed=6), 2).row(0, 33), sampling=None)
    assert torch.equal(engine.logits([chunk, decoding.row(39, 40)])[0], whole)


def test_recomputing_the_last_token_over_a_cached_prefix_gives_the_same_bits(engine):
    tokens = random_tokens(engine, 64, seed=9)
    feeder = SequenceFeeder(engine, tokens, 0)
    whole = engine.logits([feeder.row(0, 64)])
    assert torch.equal(engine.logits([feeder.row(63, 64)]), whole)
    assert torch.equal(engine.logits([feeder.row(48, 64)]), whole)


def test_a_row_that_is_not_a_number_hurts_no_other_row_and_no_later_owner_of_its_blocks(engine):
    tokens = random_tokens(engine, 30, seed=2)
    healthy = logits_in_chunks(engine, tokens, (0, 30))
    poisoned = SequenceFeeder(engine, random_tokens(engine, 30, seed=3), 1)
    engine.logits([poisoned.row(0, 30)])
    by_slot = engine.pool.tensor[:, :, list(poisoned.blocks)]
    engine.pool.tensor[:, :, list(poisoned.blocks)] = torch.full_like(by_slot, torch.nan)
    neighbours = engine.logits([poisoned.row(29, 30), SequenceFeeder(engine, tokens, 0).row(0, 30)])
    assert bool(neighbours[0].isnan().all())
    assert torch.equal(neighbours[1], healthy)
    assert torch.equal(logits_in_chunks(engine, tokens, (0, 7, 30), place=1), healthy)


@pytest.mark.parametrize("block_size", [1, 4, 5, 32])
def test_the_block_size_changes_no_bit(tiny_model_of, block_size):
    path = tiny_model_of()
    usual, other = load_engine(path), load_engine(path, block_size=block_size)
    tokens = random_tokens(usual, 70, seed=4)
    expected = logits_in_chunks(usual, tokens, (0, 70))
    assert torch.equal(logits_in_chunks(other, tokens, (0, 31, 70)), expected)


def test_tiles_of_one_row_are_used_where_places_in_a_tile_differ(tiny_model_of, monkeypatch):
    path = tiny_model_of()
    monkeypatch.setattr("engine_core.models.llama.rows_agree", lambda *arguments, tile_rows: False)
    engine = load_engine(path)
    assert engine.model.tile_rows == 1
    tokens = random_tokens(engine, 40, seed=1)
    whole = logits_in_chunks(engine, tokens, (0, 40))
    assert torch.equal(logits_in_chunks(engine, tokens, (0, 3, 40), place=2), whole)


def test_a_computation_that_depends_on_the_place_is_found_out():
    def place_dependent(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.arange(TILE_ROWS)[:, None] * 1e-6

    row = torch.ones(1, 3)
    assert rows_agree(lambda rows: rows * 2, row)
    assert not rows_agree(place_dependent, row)
