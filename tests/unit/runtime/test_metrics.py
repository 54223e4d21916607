"""What is counted, and the page that Prometheus reads."""

import pytest

from services.runtime.metric_catalogue import METRICS
from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page


def samples(metrics: Metrics) -> dict[str, float]:
    lines = metrics_page(metrics)[0].decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_every_sample_carries_the_model_and_labels_are_escaped():
    metrics = Metrics('a "model"\\of\nours')
    metrics.counter("redeliveries_total").add(2)
    assert samples(metrics)['natterjack_redeliveries_total{model_name="a \\"model\\"\\\\of\\nours"}'] == 2


def test_known_label_values_are_zero_before_they_occur():
    metrics = Metrics("smol")
    metrics.counter("request_success_total", "stop").add()
    shown = {name: value for name, value in samples(metrics).items() if "request_success" in name}
    assert len(shown) == 4
    assert sum(shown.values()) == 1


def test_a_histogram_counts_up_over_its_buckets():
    metrics = Metrics("smol")
    histogram = metrics.histogram("time_to_first_token_seconds")
    for value in (0.001, 0.0011, 0.3, 1000.0):
        histogram.observe(value)
    histogram.observe(0.02, times=3)
    shown = samples(metrics)
    bucket = 'natterjack_time_to_first_token_seconds_bucket{model_name="smol",le="%s"}'
    assert [shown[bucket % le] for le in ("0.001", "0.0015", "0.02", "0.3", "160", "+Inf")] == [1, 2, 5, 6, 6, 7]
    assert shown['natterjack_time_to_first_token_seconds_count{model_name="smol"}'] == 7
    assert shown['natterjack_time_to_first_token_seconds_sum{model_name="smol"}'] == pytest.approx(1000.3621)


def test_gauges_are_read_when_the_page_is_made():
    metrics, running = Metrics("smol"), [3.0]
    metrics.gauge("num_requests_running", lambda: running[0])
    metrics.gauges("kv_cache_usage_perc", lambda: {("executor-0",): 0.25, ("executor-1",): float("nan")})
    name = 'natterjack_num_requests_running{model_name="smol"}'
    assert samples(metrics)[name] == 3
    running[0] = 0.0
    shown = samples(metrics)
    assert shown[name] == 0
    assert shown['natterjack_kv_cache_usage_perc{model_name="smol",executor="executor-0"}'] == 0.25


def test_only_what_the_catalogue_names_can_be_counted():
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.counter("nothing_total")
    with pytest.raises(KeyError):
        metrics.gauge("nothing", lambda: 0.0)
    with pytest.raises(TypeError):
        metrics.counter("num_requests_running")
    with pytest.raises(TypeError):
        metrics.counter("request_errors_total")


def test_the_process_reports_itself_under_the_usual_names():
    shown = samples(Metrics())
    assert shown["process_cpu_seconds_total"] > 0
    assert shown["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_the_conventions(name: str):
    metric = METRICS[name]
    assert metric.text.endswith(".")
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.kind == "counter":
        assert name.endswith("_total")
    assert not metric.known or len(metric.labels) == 1
