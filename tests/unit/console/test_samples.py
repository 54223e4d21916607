"""Rates, percentiles and gauges out of instances' samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.samples import FORGET_S, MAX_INSTANCES, WINDOW_S, Samples, percentile
from tests.unit.console.console_traffic import sample

TTFT = "time_to_first_token_seconds"


def samples_of(*samples):
    """One a second, from second 0 on; returns them and the last second."""
    taken = Samples()
    for second, one in enumerate(samples):
        taken.add(one, float(second))
    return taken, float(len(samples) - 1)


def test_a_rate_is_what_was_gained_in_the_window():
    taken, now_s = samples_of(*(sample(generation_tokens_total=1000 + 10 * second) for second in range(20)))
    assert taken.rate("generation_tokens_total", now_s) == pytest.approx(10.0)
    assert taken.rate("other_total", now_s) == 0.0


def test_a_restart_counts_from_zero_and_never_backwards():
    lives = [sample(generation_tokens_total=total) for total in (100, 110)]
    lives += [sample(incarnation="b", generation_tokens_total=total) for total in (4, 8)]
    taken, now_s = samples_of(*lives)
    assert taken.rate("generation_tokens_total", now_s) == pytest.approx((10 + 4 + 4) / 3)


def test_rates_are_summed_over_instances_and_chosen_by_role_and_label():
    taken = Samples()
    for second in (0, 1):
        taken.add(sample("tokenizer-0", bus_hops_count__subject__step_plan=second * 5), second)
        taken.add(sample("executor-0", bus_hops_count__subject__step_plan=second * 20), second)
        taken.add(sample("executor-1", bus_hops_count__subject__other=second * 7), second)
    assert taken.rate("bus_hops_count", 1.0) == 32
    assert taken.rate("bus_hops_count", 1.0, role="executor") == 27
    assert taken.rate("bus_hops_count", 1.0, role="executor", subject="step_plan") == 20
    assert taken.rate("bus_hops_count", 1.0, instance="executor-1") == 7


def test_percentiles_are_of_new_observations_only():
    taken, now_s = samples_of(
        sample(histograms={TTFT: (0, 0, 100, 0)}), sample(histograms={TTFT: (0, 10, 100, 0)}), sample()
    )
    assert taken.percentiles(TTFT, (50.0,), now_s) == [pytest.approx(0.055)]
    assert taken.percentiles(TTFT, (50.0,), now_s + WINDOW_S) == [None]
    assert taken.percentiles("other", (50.0, 99.0), now_s) == [None, None]


def test_observations_above_every_bound_are_at_the_last_one():
    taken, now_s = samples_of(sample(histograms={TTFT: (0, 0, 0, 0)}), sample(histograms={TTFT: (0, 0, 0, 3)}))
    assert taken.percentiles(TTFT, (99.0,), now_s) == [1.0]


def test_a_histogram_of_another_version_is_left_out():
    taken, now_s = samples_of(sample(histograms={TTFT: (1, 0)}), sample(histograms={TTFT: (1, 5)}))
    assert taken.percentiles(TTFT, (50.0,), now_s) == [None]


def test_gauges_are_the_newest_values_of_those_who_speak():
    taken, now_s = samples_of(sample(num_requests_running=3), sample(num_requests_running=5))
    taken.add(sample("gateway-1", num_requests_running=2), now_s)
    assert taken.gauge("num_requests_running", now_s) == 7
    assert taken.gauge("num_requests_running", now_s + WINDOW_S + 1) == 0
    assert list(taken.gauges("num_requests_running", now_s, instance="gateway-1")) == [({}, 2.0)]


def test_the_silent_are_forgotten_and_a_crowd_is_bounded():
    taken = Samples()
    for number in range(2 * MAX_INSTANCES):
        taken.add(sample(f"gateway-{number}"), 0.0)
    assert len(taken._sources) == MAX_INSTANCES
    taken.forget_silent(FORGET_S + 1)
    assert taken._sources == {}


def test_an_hour_of_samples_takes_no_more_room_than_a_minute():
    taken = Samples()
    for second in range(3600):
        taken.add(sample(generation_tokens_total=second), float(second))
    assert len(taken._sources["gateway-0"].growth) <= WINDOW_S


@given(st.lists(st.floats(0.0001, 0.9), min_size=1, max_size=200), st.floats(1, 99))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, percent):
    bounds = (0.001, 0.01, 0.1, 0.5, 1.0)
    buckets = dict.fromkeys(bounds, 0)
    for value in values:
        buckets[min(bound for bound in bounds if value <= bound)] += 1
    true = sorted(values)[max(0, -(-len(values) * percent // 100) - 1).__int__()]
    bucket = min(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in bounds if bound < bucket), default=0.0)
    assert lower - 1e-9 <= percentile(buckets, percent) <= bucket + 1e-9
