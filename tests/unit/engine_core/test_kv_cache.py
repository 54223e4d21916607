"""Sizing of the KV pool, and its layout."""

from dataclasses import replace

import pytest
import torch

from engine_core.config import ModelConfig
from engine_core.engine import EngineConfig
from engine_core.errors import ModelError, OutOfMemoryError
from engine_core.kv_cache import KvPool, PoolPlan, plan_pool

MODEL = ModelConfig(
    architecture="llama",
    name="planned",
    num_layers=2,
    hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=10,
    context_length=1000,
    rms_eps=1e-5,
    rope_theta=1e4,
    rope_scale=1.0,
    tied_embeddings=True,
)
TOKEN_BYTES = 100
CONFIG = EngineConfig(block_size=16)
PLENTY = 10**12


def plan(available_bytes: int | None = PLENTY, **settings: int) -> PoolPlan:
    return plan_pool(replace(CONFIG, **settings), MODEL, TOKEN_BYTES, available_bytes)


def test_num_blocks_comes_before_kv_cache_bytes():
    assert plan(num_blocks=70, kv_cache_bytes=10**6) == PoolPlan(70, 1000)


def test_kv_cache_bytes_is_divided_into_blocks():
    assert plan(kv_cache_bytes=1600 * 65 + 1599) == PoolPlan(65, 1000)


def test_an_automatic_pool_takes_half_of_the_free_memory():
    assert plan(available_bytes=2 * 1600 * 100) == PoolPlan(100, 1000)


def test_an_automatic_pool_holds_at_most_64_full_sequences():
    assert plan() == PoolPlan(64 * 63, 1000)
    assert plan(max_model_len=160) == PoolPlan(64 * 10, 160)


def test_host_blocks_come_first_out_of_the_memory_that_an_automatic_pool_takes_half_of():
    assert plan(available_bytes=2 * 1600 * 100, host_kv_cache_bytes=1600 * 20 + 1) == PoolPlan(90, 1000, 20)


def test_host_blocks_take_nothing_from_an_accelerators_memory():
    config = replace(CONFIG, host_kv_cache_bytes=1600 * 20)
    assert plan_pool(config, MODEL, TOKEN_BYTES, 2 * 1600 * 100, on_host=False) == PoolPlan(100, 1000, 20)


def test_host_memory_that_is_not_there_is_refused():
    with pytest.raises(OutOfMemoryError, match="host_kv_cache_bytes"):
        plan(available_bytes=10_000, host_kv_cache_bytes=16_000)


def test_host_memory_for_less_than_a_block_is_refused():
    with pytest.raises(ModelError, match="one block takes 1600"):
        plan(host_kv_cache_bytes=1599)


def test_an_automatic_pool_exists_where_free_memory_is_unknown():
    assert plan(available_bytes=None).num_blocks > 0


def test_an_automatic_max_model_len_shrinks_to_the_pool_with_a_warning(caplog):
    assert plan(num_blocks=4) == PoolPlan(4, 64)
    assert "64 instead of 1000" in caplog.text


def test_the_choice_is_logged(caplog):
    caplog.set_level("INFO")
    plan(num_blocks=70)
    assert "70 blocks of 16 tokens" in caplog.text


def test_a_max_model_len_beyond_the_model_is_refused_with_both_numbers():
    with pytest.raises(ModelError, match=r"1001.*1000"):
        plan(max_model_len=1001)


@pytest.mark.parametrize(
    ("settings", "available_bytes"),
    [
        ({"num_blocks": 4, "max_model_len": 65}, PLENTY),
        ({"kv_cache_bytes": 1599}, PLENTY),
        ({"num_blocks": 100}, 100_000),
        ({}, 3000),
        ({"max_model_len": 1000}, 100_000),
    ],
)
def test_a_pool_that_does_not_fit_is_out_of_memory_with_a_remedy(settings, available_bytes):
    with pytest.raises(OutOfMemoryError, match=r"raise|lower|give"):
        plan(available_bytes, **settings)


def test_written_keys_and_values_are_where_the_layout_says():
    pool = KvPool(MODEL, num_blocks=3, block_size=4)
    assert pool.tensor.shape == (2, 2, 4, 4, 1, 4)
    keys, values = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    pool.write(1, torch.tensor([2 * 4 + 3, 0]), keys, values)
    assert torch.equal(pool.tensor[1, 0, 2, 3], keys[0])
    assert torch.equal(pool.tensor[1, 1, 0, 0], values[1])
    assert torch.count_nonzero(pool.tensor) == 16
