"""Hidden states become one vector, whose bits do not depend on how the sequence was cut into rows."""

import numpy as np
import pytest

from engine_core.pooling import HiddenPool


def states(num: int = 50, size: int = 33) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((num, size)).astype(np.float32)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_chunks_give_the_same_bits_as_the_whole(kind: str) -> None:
    hidden = states()
    whole, chunked = HiddenPool(kind), HiddenPool(kind)
    whole.add(hidden)
    for begin, end in ((0, 1), (1, 17), (17, 18), (18, 50)):
        chunked.add(hidden[begin:end])
    assert chunked.num_added == whole.num_added == 50
    assert np.array_equal(chunked.vector(), whole.vector())


def test_the_mean_and_the_last_have_length_one() -> None:
    hidden = states()
    for kind, expected in (("mean", hidden.mean(0)), ("last", hidden[-1])):
        pool = HiddenPool(kind)
        pool.add(hidden)
        vector = pool.vector()
        assert vector.dtype == np.float32
        assert vector == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)
        shortened = pool.vector(7)
        assert len(shortened) == 7
        assert np.linalg.norm(shortened) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_has_no_direction_has_no_vector(values: list[float]) -> None:
    pool = HiddenPool("mean")
    assert pool.vector() is None
    pool.add(np.array([values], dtype=np.float32))
    assert pool.vector() is None
