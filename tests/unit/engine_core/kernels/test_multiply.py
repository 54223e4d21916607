"""The matrix product against numpy on the dequantised weights and activations, over shapes and extreme values."""

from dataclasses import dataclass

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as FileType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

FILE_TYPES = (FileType.Q4_0, FileType.Q4_1, FileType.Q8_0)


@dataclass(frozen=True)
class Product:
    """A random product: weights as in a file, and activations."""

    file_type: FileType
    tensor: np.ndarray
    x: np.ndarray

    @property
    def columns(self) -> int:
        return len(self.tensor)

    def run(self, kernels, rows=slice(None), threads=1):
        return kernels.multiply(self.file_type, self.tensor, self.columns, self.x[rows], threads)


def random_product(file_type: FileType, rows: int, columns: int, k: int, *, seed: int = 0, outliers: bool = False):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((columns, k)).astype(np.float32)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    if outliers:
        x *= np.float32(10.0) ** rng.integers(-38, 12, (rows, 1))
        x[rng.random(x.shape) < 0.01] *= 1e4
        x[rng.random(x.shape) < 0.2] = 0
        weights[rng.random(weights.shape) < 0.01] *= 100
        weights[rng.random(columns) < 0.1] = 0
    return Product(file_type, np.ascontiguousarray(quantize(weights, file_type)), x)


def expected(product: Product, kernels):
    """The product in float64, and for each element the size of what may have been added up.

    Q4 sums d * q and m apart, so its terms are as large as their block's largest weight, twice.
    """
    q, scale = kernels.quantise(product.x)
    activations = (q.reshape(*scale.shape, 32) * scale[..., None].astype(np.float64)).reshape(product.x.shape)
    weights = dequantize(product.tensor, product.file_type).astype(np.float64)
    largest = np.abs(weights).reshape(len(weights), -1, 32).max(-1).repeat(32, axis=1)
    return activations @ weights.T, np.abs(activations) @ (2 * largest).T


@settings(deadline=None, max_examples=40)
@given(
    file_type=st.sampled_from(FILE_TYPES),
    rows=st.one_of(st.integers(1, 20), st.sampled_from([64, 95, 96, 97, 192, 256])),
    columns=st.integers(1, 70),
    blocks=st.sampled_from([1, 2, 17, 18, 19, 37]),
    seed=st.integers(0, 1000),
    outliers=st.booleans(),
)
def test_product_agrees_with_float64_on_the_same_quantised_values(
    kernels, file_type, rows, columns, blocks, seed, outliers
):
    product = random_product(file_type, rows, columns, 32 * blocks, seed=seed, outliers=outliers)
    result, size = expected(product, kernels)
    assert (np.abs(product.run(kernels, threads=2) - result) <= 2e-6 * size + 1e-36).all()


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_rows(kernels, file_type):
    product = random_product(file_type, 256, 80, 608, outliers=True)
    whole = product.run(kernels, threads=2)
    for rows in (*range(1, 20), 31, 32, 64, 96, 97, 200):
        first = (7 * rows) % (256 - rows)
        part = slice(first, first + rows)
        assert product.run(kernels, part).tobytes() == whole[part].tobytes()


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_all_instruction_sets_give_the_same_bits(all_kernels, file_type):
    product = random_product(file_type, 33, 49, 640, outliers=True)
    assert len({product.run(kernels).tobytes() for kernels in all_kernels}) == 1


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_a_row_with_nan_or_infinity_is_nan_throughout_and_its_neighbours_untouched(kernels, file_type):
    product = random_product(file_type, 14, 40, 96)
    clean = product.run(kernels)
    product.x[3, 70], product.x[8, 0] = np.nan, -np.inf
    spoiled = product.run(kernels)
    bad = np.isin(np.arange(14), [3, 8])
    assert np.isnan(spoiled[bad]).all()
    assert spoiled[~bad].tobytes() == clean[~bad].tobytes()


def test_extreme_weights_are_exact(kernels):
    # Every nibble or byte value at every place, with the largest activations: nothing may saturate.
    for file_type, values in ((FileType.Q4_1, np.arange(32) % 16), (FileType.Q8_0, np.linspace(-127, 127, 32).round())):
        weights = np.stack([np.roll(values, shift) for shift in range(32)]).astype(np.float32)
        tensor = np.ascontiguousarray(quantize(np.tile(weights, 8), file_type))
        x = np.full((7, 256), 127, np.float32)
        x[:, ::2] = -127
        product = Product(file_type, tensor, x)
        np.testing.assert_allclose(product.run(kernels), x @ dequantize(tensor, file_type).T, rtol=1e-5)


def test_unsupported_types_are_refused(kernels):
    x = np.ones((1, 32), np.float32)
    with pytest.raises(AssertionError):
        kernels.multiply(FileType.Q6_K, np.zeros(1000, np.uint8), 1, x)
