"""Final hidden states: bit for bit the same alone or among others, in chunks or whole, and what the head reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine_core import echo, reference
from engine_core.batch import Row, Sampling
from engine_core.engine import Engine, EngineConfig
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS, cpu_flags
from engine_core.native import load as load_native
from engine_core.native.loading import NativeOptions

TOKENS = tuple((7 * number) % 97 for number in range(70))
OTHERS = tuple((11 * number) % 97 for number in range(90))


def quiet(stage: str, fraction: float) -> None:
    pass


@pytest.fixture(params=["reference", "native"])
def engine(
    request: pytest.FixtureRequest,
    tiny_model_of: Callable[..., Path],
    write_tiny_model: Callable[..., Path],
    tiny_shape: Callable[..., Any],
) -> Engine:
    if request.param == "reference":
        return reference.load(EngineConfig(model_path=tiny_model_of(), num_blocks=32, num_threads=1), quiet)
    sizes = {"hidden": 64, "head_dim": 32, "inner": 96, "weight_type": GGMLQuantizationType.Q8_0}
    path = write_tiny_model(tiny_shape(**sizes))
    return load_native(EngineConfig(model_path=path, num_blocks=32, num_threads=1), quiet)


def row(tokens: tuple[int, ...], begin: int, end: int, first_block: int, **fields: Any) -> Row:
    return Row(tokens[begin:end], begin, tuple(range(first_block, first_block + 8)), len(tokens), **fields)


def test_chunks_among_others_give_the_bits_of_the_whole_alone(engine: Engine) -> None:
    [whole] = engine.hidden_states([row(TOKENS, 0, 70, 0, hidden="all")])
    assert whole.shape == (70, engine.info.embedding_size)
    assert whole.dtype == np.float32
    for begin, end in ((0, 1), (1, 20), (20, 37), (37, 70)):
        other, mine = engine.hidden_states(
            [row(OTHERS, begin, end, 16, hidden="last"), row(TOKENS, begin, end, 8, hidden="all")]
        )
        assert other.shape == (1, engine.info.embedding_size)
        assert mine.tobytes() == whole[begin:end].tobytes()
    [last] = engine.hidden_states([row(TOKENS, 0, 70, 24, hidden="last")])
    assert last.tobytes() == whole[-1:].tobytes()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_threads_and_instruction_sets_change_no_bit(
    write_tiny_model: Callable[..., Path], tiny_shape: Callable[..., Any], name: str
) -> None:
    if not INSTRUCTION_SETS[name].cpu_flags <= cpu_flags():
        pytest.skip(f"this processor has no {name}")
    path = write_tiny_model(tiny_shape(hidden=64, head_dim=32, inner=96, weight_type=GGMLQuantizationType.Q4_1))
    asked = [row(TOKENS, 0, 70, 0, hidden="all")]
    [expected] = load_native(EngineConfig(model_path=path, num_blocks=32, num_threads=1), quiet).hidden_states(asked)
    options = NativeOptions(instruction_set=name)
    other = load_native(EngineConfig(model_path=path, num_blocks=32, num_threads=2), quiet, options)
    assert other.hidden_states(asked)[0].tobytes() == expected.tobytes()


def test_hidden_states_are_what_the_reference_head_reads(tiny_model_of: Callable[..., Path]) -> None:
    engine = reference.load(EngineConfig(model_path=tiny_model_of(), num_blocks=32, num_threads=1), quiet)
    [hidden] = engine.hidden_states([row(TOKENS, 0, 70, 0, hidden="last")])
    [logits] = engine.logits([row(TOKENS, 0, 70, 8, sampling=Sampling(position=70, seed=0))])
    assert torch.from_numpy(hidden[0]) @ engine.model.weights.head.T == pytest.approx(logits, abs=1e-4)


def test_keys_and_values_of_embedded_tokens_serve_a_generation(engine: Engine) -> None:
    engine.hidden_states([row(TOKENS, 0, 69, 0, hidden="all")])
    greedy = Sampling(position=70, seed=0, temperature=0.0, num_logprobs=3)
    after_embedding = engine.step([row(TOKENS, 69, 70, 0, sampling=greedy)])
    assert after_embedding == engine.step([row(TOKENS, 0, 70, 8, sampling=greedy)])


def test_the_echo_engine_has_none() -> None:
    engine = echo.load(EngineConfig(vocab_size=97, num_blocks=32, num_threads=1), quiet)
    assert engine.info.embedding_size == 0
    with pytest.raises(ValueError, match="no hidden states"):
        engine.hidden_states([row(TOKENS, 0, 70, 0, hidden="all")])
