import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

BLOCKS = st.tuples(st.integers(1, 5), st.integers(1, 4)).map(lambda size: (size[0], 32 * size[1]))
VALUES = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda value: abs(value) < 1e37),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e30, -3e37]),
)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_values_come_back_within_half_a_step_of_their_block(kernels, data):
    x = data.draw(BLOCKS.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=VALUES)))
    q, scale = kernels.quantise(x)
    blocks = x.reshape(*scale.shape, 32).astype(np.float64)
    largest = np.abs(blocks).max(-1)
    assert np.isfinite(scale).all()
    assert np.abs(q.astype(int)).max() <= 127
    # Blocks of nothing but tiny values count as zero.
    allowed = np.maximum(0.502 * largest / 127, 1e-30)
    assert (np.abs(q.reshape(blocks.shape) * scale[..., None].astype(np.float64) - blocks).max(-1) <= allowed).all()


def test_a_block_that_is_not_finite_gets_no_scale_and_spoils_no_other(kernels):
    x = np.ones((3, 96), np.float32)
    x[1, 40], x[2, 0], x[2, 95] = np.nan, np.inf, -np.inf
    q, scale = kernels.quantise(x)
    assert np.isnan(scale).tolist() == [[False] * 3, [False, True, False], [True, False, True]]
    finite = ~np.isnan(scale)
    assert (q.reshape(3, 3, 32)[finite] == 127).all()


def test_zeros_have_scale_zero(kernels):
    q, scale = kernels.quantise(np.zeros((1, 32), np.float32))
    assert not q.any()
    assert scale[0, 0] == 0
