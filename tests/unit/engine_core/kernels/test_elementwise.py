import numpy as np


def test_exp2_is_exact_to_a_few_last_places(kernels):
    x = np.linspace(-126, 127, 16 * 4096).astype(np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert (np.abs(kernels.elementwise("nj_exp2", x) - expected) <= 1.5e-7 * expected).all()


def test_exp2_of_what_is_masked_is_exactly_zero_and_of_nan_is_nan(kernels):
    x = np.array([-np.inf, -127, -126.01, np.nan, 0, 1, -1, 10] * 2, np.float32)
    y = kernels.elementwise("nj_exp2", x)
    assert y[:3].tolist() == [0, 0, 0]
    assert np.isnan(y[3])
    assert y[4:8].tolist() == [1, 2, 0.5, 1024]


def test_silu_follows_its_definition_from_large_negative_to_large_positive(kernels):
    x = np.concatenate([np.linspace(-200, 200, 4080), np.full(16, np.nan)]).astype(np.float32)
    y = kernels.elementwise("nj_silu", x)
    with np.errstate(over="ignore"):
        expected = x[:4080].astype(np.float64) / (1 + np.exp(-x[:4080].astype(np.float64)))
    np.testing.assert_allclose(y[:4080], expected, rtol=2e-5, atol=1e-30)
    assert np.isnan(y[4080:]).all()


def test_all_instruction_sets_give_the_same_bits(all_kernels):
    x = np.random.default_rng(0).normal(0, 30, 16 * 1000).astype(np.float32)
    for name in ("nj_exp2", "nj_silu"):
        assert len({kernels.elementwise(name, x).tobytes() for kernels in all_kernels}) == 1
