"""Blocks that go to host memory and come back, into other blocks, give the bits that they would have given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from engine_core import echo, reference
from engine_core.batch import Row, Sampling
from engine_core.block_copies import BlockCopy
from engine_core.engine import Engine, EngineConfig
from engine_core.native import load as load_native
from engine_core.native.loading import CACHE_KINDS

NUM_BLOCKS = 12
NUM_HOST_BLOCKS = 5
TOKENS = tuple((7 * number) % 97 for number in range(40))
OTHERS = tuple((11 * number) % 97 for number in range(90))
BLOCKS, ELSEWHERE = (0, 1, 2), (8, 5, 2)
KINDS = ("echo", "reference", *(f"native {name}" for name in CACHE_KINDS if name != "auto"))


def quiet(stage: str, fraction: float) -> None:
    pass


@pytest.fixture(params=KINDS)
def engine(
    request: pytest.FixtureRequest,
    tiny_model_of: Callable[..., Path],
    write_tiny_model: Callable[..., Path],
    tiny_shape: Callable[..., Any],
) -> Engine:
    settings = {"num_blocks": NUM_BLOCKS, "num_threads": 1, "host_kv_cache_bytes": 10**6}
    kind, _, kv_dtype = request.param.partition(" ")
    if kind == "echo":
        loaded: Engine = echo.load(EngineConfig(vocab_size=97, **settings | {"host_kv_cache_bytes": 5 * 64}), quiet)
    elif kind == "reference":
        loaded = reference.load(EngineConfig(model_path=tiny_model_of(), **settings), quiet)
    else:
        sizes = {"hidden": 64, "head_dim": 32, "inner": 96, "weight_type": GGMLQuantizationType.Q8_0}
        path = write_tiny_model(tiny_shape(**sizes))
        loaded = load_native(EngineConfig(model_path=path, kv_dtype=kv_dtype, **settings), quiet)
    assert loaded.info.num_host_blocks >= NUM_HOST_BLOCKS
    return loaded


def next_token(engine: Engine, blocks: tuple[int, ...], start: int) -> tuple[int, float | None]:
    """What follows TOKENS, of which those before `start` are in the blocks."""
    sampling = Sampling(position=len(TOKENS), seed=0, temperature=0.0, num_logprobs=1)
    [sampled] = engine.step([Row(TOKENS[start:], start, blocks, len(TOKENS), sampling)])
    assert sampled is not None
    return sampled.token, sampled.logprob


def host(number: int) -> int:
    return NUM_BLOCKS + number


def test_a_block_comes_back_as_it_was(engine: Engine) -> None:
    expected = next_token(engine, BLOCKS, 0)
    engine.copy_blocks([(0, host(3)), (1, host(0))])
    engine.step([Row(OTHERS, 0, (0, 1, 3, 4, 6, 7), len(OTHERS))])
    engine.copy_blocks([(host(3), ELSEWHERE[0]), (host(0), ELSEWHERE[1])])
    assert next_token(engine, ELSEWHERE, 32) == expected


def test_copies_are_done_in_order(engine: Engine) -> None:
    """A host block is read, and filled anew behind that; a block is kept, and filled anew behind that."""
    expected = next_token(engine, BLOCKS, 0)
    engine.copy_blocks([(0, host(0)), (1, host(1))])
    engine.step([Row(OTHERS[:32], 0, (8, 5), 32)])
    swaps: list[BlockCopy] = [(8, host(2)), (host(0), 8), (5, host(0)), (host(1), 5)]
    engine.copy_blocks(swaps)
    assert next_token(engine, ELSEWHERE, 32) == expected
    engine.copy_blocks([(host(2), 0), (host(0), 1)])
    expected = next_token(engine, BLOCKS, 0)
    assert next_token(engine, BLOCKS, 32) == expected


@pytest.mark.parametrize("copy", [(0, 1), (host(0), host(1)), (-1, host(0)), (0, 10**6), (NUM_BLOCKS - 1, -1), (4, 4)])
def test_a_copy_between_other_blocks_is_refused(engine: Engine, copy: BlockCopy) -> None:
    with pytest.raises(ValueError, match="no copy from block"):
        engine.copy_blocks([copy])
