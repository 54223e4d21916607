"""The reference engine: loading, its refusals, steps, warm-up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core import reference, torch_options
from engine_core.batch import Row, Sampled, Sampling
from engine_core.engine import EngineConfig, load_engine
from engine_core.errors import ModelError, ModelFileError, OutOfMemoryError, UnsupportedModelError
from engine_core.reference import ReferenceEngine

PROMPT = (3, 14, 15, 92, 65, 35, 89)


def load_reference(path: Path | None, **settings: int) -> ReferenceEngine:
    config = EngineConfig(model_path=path, **{"num_blocks": 8, "num_threads": 1} | settings)
    return reference.load(config, lambda stage, fraction: None)


@pytest.fixture
def engine(tiny_model_of: Callable[..., Path]) -> ReferenceEngine:
    return load_reference(tiny_model_of())


def greedy(position: int, **more: object) -> Sampling:
    return Sampling(position=position, seed=0, temperature=0.0, **more)


def test_the_info_says_what_the_engine_turned_out_to_be(engine):
    info = engine.info
    assert (info.name, info.model, info.vocab_size, info.max_model_len) == ("reference", "tiny", 97, 128)
    assert (info.block_size, info.num_blocks, info.device) == (16, 8, "cpu")
    assert info.kernels == "torch float32, tiled attention"


def test_a_step_samples_where_asked_and_only_there(engine):
    rows = [
        Row(PROMPT, 0, (0,), 7, greedy(7, num_logprobs=2)),
        Row(PROMPT[:4], 0, (3,), 7),
        Row(PROMPT, 0, (5,), 7, greedy(7)),
    ]
    first, second, third = engine.step(rows)
    logits = engine.logits([Row(PROMPT, 0, (6,), 7, greedy(7))])[0]
    logprobs = torch.log_softmax(logits.double(), 0)
    assert second is None
    assert third == Sampled(int(logits.argmax()))
    assert (first.token, first.logprob) == (third.token, float(logprobs[first.token]))
    assert len(first.top) == 2


def test_steps_without_rows_or_without_sampling_give_no_tokens(engine):
    assert engine.step([]) == []
    assert engine.step([Row(PROMPT, 0, (0,), 7)]) == [None]


def test_generation_through_the_pool_equals_recomputing_everything(engine):
    tokens = list(PROMPT)
    row = Row(PROMPT, 0, (4, 1, 6), 7, greedy(7))
    for _ in range(30):
        (sampled,) = engine.step([row])
        expected = engine.logits([Row(tuple(tokens), 0, (0, 2, 3), 7, greedy(0))]).argmax()
        assert sampled.token == int(expected)
        row = Row((sampled.token,), len(tokens), (4, 1, 6), 7, greedy(len(tokens) + 1))
        tokens.append(sampled.token)


def test_seeded_sampling_is_reproduced_by_another_engine(tiny_model_of):
    def draws() -> list[int]:
        engine = load_reference(tiny_model_of())
        rows = [
            Row(PROMPT, 0, (block,), 7, Sampling(position=7, seed=seed, temperature=1.5))
            for block, seed in enumerate((1, 2, 3, 1, 2**63))
        ]
        return [sampled.token for sampled in engine.step(rows)]

    assert draws() == draws()
    assert draws()[0] == draws()[3]


def test_a_row_that_is_not_a_number_gets_no_token_and_hurts_no_other(write_tiny_model, engine, tiny_shape):
    embedding = np.random.default_rng(1).standard_normal((97, 20)).astype(np.float32)
    healthy_path = write_tiny_model(tensors={"token_embd.weight": embedding, "output.weight": embedding})
    healthy = load_reference(healthy_path).step([Row(PROMPT, 0, (0,), 7, greedy(7, num_logprobs=1))])
    poisoned = embedding.copy()
    poisoned[50] = np.nan
    engine = load_reference(write_tiny_model(tensors={"token_embd.weight": poisoned, "output.weight": embedding}))
    rows = [Row((50, 1), 0, (1,), 2, greedy(2)), Row(PROMPT, 0, (0,), 7, greedy(7, num_logprobs=1))]
    assert engine.step(rows) == [Sampled(-1), *healthy]


def test_warm_up_leaves_the_pool_as_it_was_but_for_the_scratch_block(engine):
    engine.warm_up()
    scratch = engine.pool.scratch_block
    assert scratch == engine.info.num_blocks
    assert torch.count_nonzero(engine.pool.tensor[:, :, :scratch]) == 0
    assert torch.count_nonzero(engine.pool.tensor[:, :, scratch]) > 0


def test_rows_that_do_not_fit_are_refused_with_nothing_written(engine):
    with pytest.raises(ValueError, match="row 1.*outside the pool"):
        engine.step([Row(PROMPT, 0, (0,), 7), Row(PROMPT, 0, (8,), 7)])
    assert torch.count_nonzero(engine.pool.tensor) == 0


def test_loading_reports_its_progress(tiny_model_of):
    seen: list[tuple[str, float]] = []
    config = EngineConfig(model_path=tiny_model_of(), num_blocks=8)
    load_engine("reference", config, lambda stage, fraction: seen.append((stage, fraction)))
    assert seen[0] == ("open", 0.0)
    assert ("weights", 1.0) in seen
    assert seen[-1] == ("kv_pool", 1.0)
    fractions = [fraction for stage, fraction in seen if stage == "weights"]
    assert fractions == sorted(fractions)


def test_the_thread_count_is_the_configured_one(tiny_model_of):
    load_reference(tiny_model_of(), num_threads=1)
    assert torch.get_num_threads() == 1
    load_reference(tiny_model_of(), num_threads=2)
    assert torch.get_num_threads() == 2


def test_an_explicit_max_model_len_is_kept_and_one_beyond_the_model_refused(tiny_model_of):
    assert load_reference(tiny_model_of(), max_model_len=100).info.max_model_len == 100
    with pytest.raises(ModelError, match="129"):
        load_reference(tiny_model_of(), max_model_len=129)


def test_linear_rope_scaling_and_frequency_factors_change_the_result(write_tiny_model, engine):
    def logits(**model: object) -> torch.Tensor:
        return load_reference(write_tiny_model(**model)).logits([Row(PROMPT, 0, (0,), 7, greedy(7))])

    plain = logits()
    scaled = logits(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    by_factors = logits(tensors={"rope_freqs.weight": np.full(3, 2.0, dtype=np.float32)})
    assert not torch.allclose(plain, scaled, atol=1e-3)
    assert torch.allclose(by_factors, scaled, atol=1e-5)


def test_no_path_is_a_clear_error():
    with pytest.raises(ModelFileError, match="model_path"):
        load_reference(None)


def test_foreign_tensors_are_refused_rather_than_ignored(write_tiny_model):
    bias = {"blk.0.attn_q.bias": np.zeros(24, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        load_reference(write_tiny_model(tensors=bias))


def test_a_tensor_of_the_wrong_shape_is_a_file_error_with_both_shapes(write_tiny_model):
    wrong = {"blk.1.ffn_up.weight": np.zeros((28, 19), dtype=np.float32)}
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up.*\[28, 19\], expected \[28, 20\]"):
        load_reference(write_tiny_model(tensors=wrong))


def test_weights_that_do_not_fit_into_memory_are_refused_before_loading(tiny_model_of, monkeypatch):
    monkeypatch.setattr(torch_options, "available_memory_bytes", lambda: 10_000)
    with pytest.raises(OutOfMemoryError, match="weights take"):
        load_reference(tiny_model_of())


def test_an_unknown_engine_name_is_a_key_error():
    with pytest.raises(KeyError, match="imaginary"):
        load_engine("imaginary", EngineConfig(), lambda stage, fraction: None)
