"""Paged attention against numpy in float64, over shapes, block tables and extreme values.

Every block of the cache is filled with NaN beforehand, so reading beyond what was written would show.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kernels.binding import CacheKind

ROUNDING = {CacheKind.F32: 2e-6, CacheKind.F16: 2e-3, CacheKind.BF16: 1.5e-2, CacheKind.INT8: 2e-2}
"""Largest error for keys, queries and values of order one."""


def random_sequence(make_sequence, tokens, heads, kv_heads, head_dim, *, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    shapes = [(tokens, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, head_dim)]
    return make_sequence(*[(size * rng.standard_normal(shape)).astype(np.float32) for shape in shapes])


def shuffled_table(tokens, block_size, seed=0):
    count = -(-tokens // block_size)
    return [int(block) for block in np.random.default_rng(seed).permutation(count + 3)[:count]]


def expected(sequence):
    queries, keys, values = (array.astype(np.float64) for array in (sequence.queries, sequence.keys, sequence.values))
    shared = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat(shared, axis=1), values.repeat(shared, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[2])
    scores[:, ~np.tri(len(queries), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(CacheKind),
    tokens=st.one_of(st.integers(1, 70), st.sampled_from([95, 96, 97, 128, 129])),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 6),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([16, 32, 48]),
    seed=st.integers(0, 1000),
)
def test_attention_agrees_with_float64(
    kernels, make_sequence, kind, tokens, kv_heads, shared, head_dim, block_size, seed
):
    sequence = random_sequence(make_sequence, tokens, kv_heads * shared, kv_heads, head_dim, seed=seed)
    table = shuffled_table(tokens, block_size, seed)
    out = kernels.attend(kind, sequence, table, block_size=block_size, group=max(6 // shared, 1))
    assert np.abs(out - expected(sequence)).max() < ROUNDING[kind] * 4


@pytest.mark.parametrize("kind", CacheKind)
def test_a_position_has_the_same_bits_alone_and_among_others_and_in_any_blocks(kernels, make_sequence, kind):
    sequence = random_sequence(make_sequence, 83, 9, 3, 64)
    reference = kernels.attend(kind, sequence, shuffled_table(83, 16), group=1)
    for group in (1, 2):
        for first in (0, 1, 30, 31, 47):
            table = shuffled_table(83, 16, seed=group)
            out = kernels.attend(kind, sequence, table, first=first, group=group)
            assert out[first:].tobytes() == reference[first:].tobytes()
    assert kernels.attend(kind, sequence, [2, 0, 1], block_size=32).tobytes() == reference.tobytes()


@pytest.mark.parametrize("kind", CacheKind)
def test_all_instruction_sets_give_the_same_bits(all_kernels, make_sequence, kind):
    sequence = random_sequence(make_sequence, 50, 6, 2, 64, size=3.0)
    assert len({kernels.attend(kind, sequence, [1, 3, 0, 2], group=2).tobytes() for kernels in all_kernels}) == 1


@pytest.mark.parametrize("kind", CacheKind)
def test_huge_and_zero_scores_stay_finite(kernels, make_sequence, kind):
    sequence = random_sequence(make_sequence, 40, 3, 1, 64, size=200.0)
    sequence.queries[5] = 0
    sequence.keys[7] = 0
    sequence.values[7] = 1e-40
    out = kernels.attend(kind, sequence, [0, 1, 2], group=2)
    assert np.isfinite(out).all()
    # With scores this far apart the likeliest key takes all.
    assert np.abs(out).max() <= np.abs(sequence.values).max() * 1.01


def test_values_beyond_half_precision_are_clamped_not_infinite(kernels, make_sequence):
    sequence = random_sequence(make_sequence, 3, 3, 1, 32)
    sequence.values[:] = 1e6
    np.testing.assert_allclose(kernels.attend(CacheKind.F16, sequence, [0]), 65504, rtol=1e-6)


@pytest.mark.parametrize("kind", CacheKind)
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_nan_spoils_only_the_positions_that_see_it(kernels, make_sequence, kind, part):
    sequence = random_sequence(make_sequence, 40, 3, 1, 64)
    clean = kernels.attend(kind, sequence, [0, 1, 2])
    getattr(sequence, part)[20, :, 3] = np.nan
    spoiled = kernels.attend(kind, sequence, [0, 1, 2])
    seeing = np.arange(40) == 20 if part == "queries" else np.arange(40) >= 20
    assert np.isnan(spoiled[seeing]).any(axis=2).all()
    assert spoiled[~seeing].tobytes() == clean[~seeing].tobytes()
