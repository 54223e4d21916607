"""The echo engine: says the prompt again, through its block tables."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from engine_core.batch import Row, Sampled, Sampling
from engine_core.engine import Engine, EngineConfig, load_engine
from engine_core.errors import ModelError, OutOfMemoryError

PROMPT = (11, 22, 33, 44, 55)


def load_echo(**settings: float) -> Engine:
    config = EngineConfig(block_size=4, num_blocks=16, vocab_size=100)
    return load_engine("echo", replace(config, **settings), lambda stage, fraction: None)


def generate(engine: Engine, blocks: tuple[int, ...], count: int) -> list[int]:
    row = Row(PROMPT, 0, blocks, len(PROMPT), Sampling(position=len(PROMPT), seed=0))
    tokens = []
    for position in range(len(PROMPT), len(PROMPT) + count):
        (sampled,) = engine.step([row])
        tokens.append(sampled.token)
        sampling = Sampling(position=position + 1, seed=0)
        row = Row((sampled.token,), position, blocks, len(PROMPT), sampling)
    return tokens


def test_the_prompt_is_said_again_and_again():
    assert generate(load_echo(), (3, 0, 9, 5), 8) == [11, 22, 33, 44, 55, 11, 22, 33]


def test_a_prompt_fed_in_chunks_gives_the_same_tokens():
    engine = load_echo()
    first = Row(PROMPT[:3], 0, (7, 2), 5)
    last = Row(PROMPT[3:], 3, (7, 2), 5, Sampling(position=5, seed=0))
    assert engine.step([first]) == [None]
    assert engine.step([last]) == [Sampled(11)]


def test_rows_of_one_step_do_not_mix():
    engine = load_echo()
    rows = [Row((token,) * 4, 0, (block,), 4, Sampling(position=4, seed=0)) for block, token in enumerate(PROMPT)]
    assert [sampled.token for sampled in engine.step(rows)] == list(PROMPT)


def test_a_wrong_block_table_shows_as_wrong_tokens():
    engine = load_echo()
    engine.step([Row(PROMPT, 0, (0, 1), 5, Sampling(position=5, seed=0))])
    engine.step([Row((99, 98, 97, 96), 0, (2,), 4)])
    of_another = Row((11,), 5, (2, 1), 5, Sampling(position=6, seed=0))
    assert engine.step([of_another]) == [Sampled(98)]
    never_written = Row((11,), 5, (8, 1), 5, Sampling(position=6, seed=0))
    assert engine.step([never_written]) == [Sampled(-1)]


def test_logprobs_are_those_of_a_certain_token_when_asked_for():
    engine = load_echo()
    row = Row(PROMPT, 0, (0, 1), 5, Sampling(position=5, seed=0, num_logprobs=0))
    assert engine.step([row]) == [Sampled(11, 0.0)]
    row = replace(row, sampling=Sampling(position=5, seed=0, num_logprobs=3))
    assert engine.step([row]) == [Sampled(11, 0.0, ((11, 0.0),))]


def test_a_banned_token_is_replaced_by_the_next_id():
    engine = load_echo()
    sampling = Sampling(position=5, seed=0, banned=(11, 12))
    assert engine.step([Row(PROMPT, 0, (0, 1), 5, sampling)]) == [Sampled(13)]
    every_token = Sampling(position=5, seed=0, banned=tuple(range(100)))
    assert engine.step([Row(PROMPT, 0, (0, 1), 5, every_token)]) == [Sampled(-2)]


def test_a_step_takes_the_step_time():
    engine = load_echo(step_time_s=0.03)
    began = time.monotonic()
    engine.step([Row(PROMPT, 0, (0, 1), 5)])
    assert time.monotonic() - began >= 0.03


def test_the_info_follows_the_configuration():
    info = load_echo().info
    assert (info.name, info.vocab_size, info.block_size, info.num_blocks, info.max_model_len) == (
        "echo",
        100,
        4,
        16,
        64,
    )
    assert load_echo(num_blocks=0, kv_cache_bytes=160).info.num_blocks == 10
    assert load_echo(num_blocks=0, max_model_len=30).info.num_blocks == 64 * 8


def test_impossible_configurations_are_refused():
    with pytest.raises(ModelError, match="vocab_size"):
        load_echo(vocab_size=0)
    with pytest.raises(OutOfMemoryError, match="num_blocks"):
        load_echo(max_model_len=65)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row((), 0, (0,), 1), "no tokens"),
        (Row((100,), 0, (0,), 1), "vocabulary"),
        (Row((-1,), 0, (0,), 1), "vocabulary"),
        (Row((1,), -1, (0,), 1), "positions"),
        (Row((1,), 64, tuple(range(16)), 1), "model length"),
        (Row((1,) * 5, 0, (0,), 5), "too few"),
        (Row((1,), 0, (16,), 1), "outside the pool"),
        (Row((1,), 0, (-1,), 1), "outside the pool"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_before_anything_is_written(row, problem):
    engine = load_echo()
    with pytest.raises(ValueError, match=problem):
        engine.step([Row(PROMPT[:4], 0, (3,), 4), row])
    assert engine.step([Row((5,), 4, (3, 1), 4, Sampling(position=5, seed=0))]) == [Sampled(-1)]


def test_two_rows_that_write_one_block_are_refused():
    with pytest.raises(ValueError, match="same block"):
        load_echo().step([Row((1,), 0, (3,), 1), Row((2,), 0, (3,), 1)])


def test_the_echo_engine_needs_no_torch():
    program = "import sys, engine_core.echo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
