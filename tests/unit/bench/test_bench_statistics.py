"""Figures are numpy's, and no values give zeros rather than errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.statistics import latency_figures, percentile

values = st.lists(st.floats(0, 1e4), min_size=1, max_size=60)


@given(values, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(numbers, percent):
    assert percentile(sorted(numbers), percent) == pytest.approx(np.percentile(numbers, percent), abs=1e-6)


@given(values)
def test_mean_median_and_deviation_are_those_of_numpy_in_milliseconds(seconds):
    figures = latency_figures("ttft", seconds)
    assert figures["mean_ttft_ms"] == pytest.approx(np.mean(seconds) * 1e3, abs=1e-6)
    assert figures["median_ttft_ms"] == pytest.approx(np.median(seconds) * 1e3, abs=1e-6)
    assert figures["std_ttft_ms"] == pytest.approx(np.std(seconds) * 1e3, rel=1e-6, abs=1e-3)


def test_the_keys_name_the_percentiles():
    keys = [f"{kind}_itl_ms" for kind in ("mean", "median", "std", "p90", "p95", "p99")]
    assert list(latency_figures("itl", [1.0])) == keys


def test_no_values_give_zeros():
    assert set(latency_figures("itl", []).values()) == {0.0}
