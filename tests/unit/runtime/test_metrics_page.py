"""Prometheus reads the page in its own format or in OpenMetrics, where latencies name a trace that explains them."""

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page

TRACE = "0af7651916cd43dd8448eb211c80319c"


def measured() -> Metrics:
    metrics = Metrics('sm"ol')
    metrics.counter("requests_accepted_total").add(3)
    metrics.counter("request_errors_total", "queue_full").add()
    metrics.histogram("time_to_first_token_seconds").observe(0.004)
    metrics.histogram("time_to_first_token_seconds").observe(0.0042, trace_id=TRACE)
    metrics.histogram("time_to_first_token_seconds").observe(1000.0)
    metrics.gauge("num_requests_open", lambda: 2)
    return metrics


def test_both_formats_hold_the_same_numbers() -> None:
    plain, content_type = metrics_page(measured(), "text/plain")
    assert content_type.startswith("text/plain")
    opened, open_type = metrics_page(measured(), "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert open_type.startswith("application/openmetrics-text")
    seen = [
        {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
        for families in (parse(plain.decode()), parse_open(opened.decode()))
    ]
    process = {key for key in seen[0] if key[0].startswith("process_")}
    assert {key: seen[0][key] for key in seen[0].keys() - process} == {
        key: seen[1][key] for key in seen[1].keys() - process
    }
    assert seen[0][("natterjack_requests_accepted_total", ("model_name", 'sm"ol'))] == 3
    assert seen[0][("natterjack_time_to_first_token_seconds_count", ("model_name", 'sm"ol'))] == 3


def test_a_bucket_names_the_trace_of_its_latest_observation() -> None:
    families = parse_open(metrics_page(measured(), "application/openmetrics-text")[0].decode())
    exemplars = [sample.exemplar for family in families for sample in family.samples if sample.exemplar]
    assert [(e.labels, e.value) for e in exemplars] == [({"trace_id": TRACE}, 0.0042)]
    assert "trace_id" not in metrics_page(measured())[0].decode()
