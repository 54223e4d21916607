"""The native engine on tiny models: against the reference, sampling, what it refuses, what it leaves behind."""

import gguf
import numpy as np
import pytest
import torch

from engine_core import reference
from engine_core.batch import NO_TOKEN, Row, Sampled, Sampling
from engine_core.engine import EngineConfig, load_engine
from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.kernels.binding import CacheKind
from engine_core.sampling import sample

FileType = gguf.GGMLQuantizationType
PROMPT = tuple(range(3, 90, 2))


def relative_difference(logits, expected) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("kind", CacheKind)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"weight_type": FileType.Q4_0, "layers": 1},
        {"weight_type": FileType.Q4_1, "tied": False},
        {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 96, "vocab": 131},
        {"heads": 10, "kv_heads": 2, "head_dim": 96, "inner": 224},
        {"heads": 14, "kv_heads": 1, "layers": 3},
        {"heads": 13, "kv_heads": 13, "head_dim": 128, "vocab": 31},
    ],
    ids=str,
)
def test_logits_are_those_of_the_reference_but_for_rounding(
    load_native, write_tiny_model, quantised_shape, sizes, kind
):
    path = write_tiny_model(quantised_shape(**sizes))
    config = EngineConfig(model_path=path, num_blocks=16, num_threads=1)
    prompt = tuple(token % sizes.get("vocab", 97) for token in PROMPT)
    row = Row(prompt, 0, (5, 2, 9), len(prompt), Sampling(position=len(prompt), seed=0))
    expected = reference.load(config, lambda stage, fraction: None).logits([row])
    # Tiny random models forgive less than real ones: activations of 8 bits alone cost about 1 %.
    assert relative_difference(load_native(path, cache_kind=kind).logits([row]), expected) < 0.05


def test_logits_after_each_token_are_those_of_growing_prompts(load_native, write_tiny_model, quantised_shape, greedy):
    engine = load_native(write_tiny_model(quantised_shape()))
    scored = engine.logits_after_each_token([Row(PROMPT, 0, (1, 2, 3), len(PROMPT))])
    for end in (1, 16, 17, len(PROMPT)):
        assert torch.equal(engine.logits([greedy(PROMPT[:end], 0, (4, 5, 6))])[0], scored[end - 1])


def test_each_row_gets_what_it_asked_for(load_native, write_tiny_model, quantised_shape, greedy):
    engine = load_native(write_tiny_model(quantised_shape()))
    specs = [
        Sampling(position=10, seed=1, temperature=0.0),
        Sampling(position=10, seed=2, temperature=0.9, top_p=0.9),
        Sampling(position=10, seed=3, temperature=0.0, num_logprobs=3),
        None,
        Sampling(position=10, seed=4, top_k=1),
        Sampling(position=10, seed=5, temperature=0.0, banned=(0, 1, 2)),
    ]
    rows = [Row(PROMPT[i : i + 10], 0, (i,), 10, spec) for i, spec in enumerate(specs)]
    answers = engine.step(rows)
    expected = iter(sample(engine.logits(rows), [spec for spec in specs if spec is not None]))
    assert answers == [None if spec is None else next(expected) for spec in specs]
    assert len(answers[2].top) == 3


def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_keep_theirs(
    load_native, write_tiny_model, quantised_shape, greedy
):
    shape = quantised_shape(tied=False)
    embedding = np.random.default_rng(0).standard_normal((shape.vocab, shape.hidden)).astype(np.float32)
    embedding[7] = 1e30  # beyond the range of the file's scales
    with np.errstate(over="ignore", invalid="ignore"):
        engine = load_native(write_tiny_model(shape, tensors={"token_embd.weight": embedding}))
    good = [greedy((1, 2, 3), 0, (0,)), greedy((4, 5, 6), 0, (2,))]
    expected = engine.step(good)
    bad = greedy((1, 7, 3), 0, (1,))
    random_bad = Row((7,), 0, (3,), 1, Sampling(position=1, seed=0))
    assert engine.step([good[0], bad, good[1], random_bad]) == [
        expected[0],
        Sampled(NO_TOKEN),
        expected[1],
        Sampled(NO_TOKEN),
    ]
    # The blocks it wrote can be used again at once.
    assert engine.step([greedy((1, 2, 3), 0, (1,))]) == expected[:1]


def test_warm_up_leaves_the_blocks_as_they_were(load_native, write_tiny_model, quantised_shape, greedy):
    engine = load_native(write_tiny_model(quantised_shape()), num_blocks=3)
    tables = [(0,), (1,), (2,)]
    engine.step([Row(PROMPT[:15], 0, table, 16) for table in tables])
    before = engine.logits([greedy((9,), 15, table) for table in tables])
    engine.warm_up()
    assert torch.equal(engine.logits([greedy((9,), 15, table) for table in tables]), before)


def test_steps_without_rows_or_without_sampling_give_no_tokens(load_native, write_tiny_model, quantised_shape):
    engine = load_native(write_tiny_model(quantised_shape()))
    assert engine.step([]) == []
    assert engine.step([Row(PROMPT, 0, (0, 1, 2), 99)]) == [None]


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    load_native, write_tiny_model, quantised_shape, greedy
):
    engine = load_native(write_tiny_model(quantised_shape()))
    for row in (greedy((97,), 0, (0,)), greedy((1,), 16, (0,)), greedy((1,), 0, (16,)), greedy((1,), -1, (0,))):
        with pytest.raises(ValueError, match="row 0"):
            engine.step([row])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"weight_type": FileType.F32}, "has type F32"),
        ({"hidden": 48, "weight_type": FileType.F32}, "hidden_size 48 is not a multiple of 32"),
        ({"head_dim": 48}, "head_dim 48 is not a multiple of 32"),
        ({"head_dim": 288}, "head dimension 288 is above 256"),
    ],
)
def test_a_model_that_the_kernels_cannot_run_is_refused_with_the_reason(
    load_native, write_tiny_model, quantised_shape, sizes, reason
):
    with pytest.raises(UnsupportedModelError, match=reason):
        load_native(write_tiny_model(quantised_shape(**sizes)))


def test_foreign_tensors_other_block_sizes_and_no_path_are_refused(load_native, write_tiny_model, quantised_shape):
    path = write_tiny_model(quantised_shape(), tensors={"blk.0.attn_q.bias": np.zeros(128, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        load_native(path)
    with pytest.raises(UnsupportedModelError, match="block_size 24"):
        load_native(path, block_size=24)
    with pytest.raises(ModelFileError, match="model_path"):
        load_native(None)


def test_wrong_shapes_are_refused(load_native, write_tiny_model, quantised_shape):
    path = write_tiny_model(quantised_shape(), tensors={"blk.1.ffn_up.weight": np.zeros((64, 64), np.float32)})
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        load_native(path)


def test_queries_keys_and_values_of_different_widths_are_refused_by_layer(
    load_native, write_tiny_model, quantised_shape
):
    shape = quantised_shape(weight_type=FileType.Q8_0)
    path = write_tiny_model(shape, stored={"blk.1.attn_k.weight": FileType.Q4_0})
    with pytest.raises(UnsupportedModelError, match=r"attn_q, attn_k, attn_v of layer 1 mix 4-bit and 8-bit"):
        load_native(path)
    fallback = load_engine("auto", EngineConfig(model_path=path, num_blocks=8, num_threads=1), lambda stage, done: None)
    assert fallback.info.name == "reference"


def test_values_may_be_wider_where_nothing_is_multiplied_with_them(load_native, write_tiny_model, quantised_shape):
    shape = quantised_shape(weight_type=FileType.Q4_1)
    path = write_tiny_model(
        shape, stored={"blk.0.attn_output.weight": FileType.Q8_0, "blk.1.ffn_down.weight": FileType.Q8_0}
    )
    assert load_native(path).info.name == "native"
