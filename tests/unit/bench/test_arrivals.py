"""The schedule offers the asked rate, and its gaps are as bursty as asked."""

import math
import statistics

import pytest

from services.bench.arrivals import arrival_times


def gaps(times):
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def variation(burstiness):
    spread = gaps(arrival_times(20_000, 10.0, burstiness, seed=1))
    return statistics.pstdev(spread) / statistics.mean(spread)


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_the_last_request_comes_when_the_rate_says():
    times = arrival_times(500, 20.0, 1.0, seed=3)
    assert times[-1] == pytest.approx(25.0)
    assert times == sorted(times)


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_the_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness, expected):
    assert variation(burstiness) == pytest.approx(expected, rel=0.05)


def test_infinite_burstiness_means_even_gaps():
    assert gaps(arrival_times(4, 2.0, math.inf, seed=0)) == [0.5] * 4


def test_the_same_seed_gives_the_same_times_and_another_seed_others():
    assert arrival_times(9, 2.0, 1.0, seed=5) == arrival_times(9, 2.0, 1.0, seed=5)
    assert arrival_times(9, 2.0, 1.0, seed=5) != arrival_times(9, 2.0, 1.0, seed=6)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_a_rate_or_burstiness_that_is_not_positive_is_refused(rate, burstiness):
    with pytest.raises(ValueError, match="positive"):
        arrival_times(1, rate, burstiness, seed=0)
