"""Metrics reach an OTLP collector with the numbers of the Prometheus page, and a missing collector harms nothing."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from services.runtime.metrics import Metrics
from services.runtime.otlp_metrics import pushing_metrics
from services.runtime.settings import TelemetrySettings
from services.runtime.telemetry import resource_of

RESOURCE = resource_of("executor", "executor-0")
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/metrics"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def latest(self) -> dict[str, Metric]:
        (resource,) = self.requests[-1].resource_metrics
        assert {a.key: a.value.string_value for a in resource.resource.attributes}[
            "service.instance.id"
        ] == "executor-0"
        return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


async def test_numbers_arrive_while_running_and_at_the_end(collector: Collector) -> None:
    metrics = Metrics("smol")
    metrics.counter("requests_accepted_total").add(3)
    metrics.gauge("num_requests_open", lambda: 2)
    first_token = metrics.histogram("time_to_first_token_seconds")
    first_token.observe(0.004, trace_id=TRACE)
    settings = TelemetrySettings(otlp_endpoint=collector.url + "/", otlp_metrics_period_s=0.05)
    async with pushing_metrics(settings, metrics, RESOURCE):
        async with asyncio.timeout(10):
            while len(collector.requests) < 2:
                await asyncio.sleep(0.01)
        first_token.observe(2.0)
    found = collector.latest()
    (accepted,) = found["natterjack_requests_accepted_total"].sum.data_points
    assert found["natterjack_requests_accepted_total"].sum.is_monotonic
    assert accepted.as_double == 3
    assert {a.key: a.value.string_value for a in accepted.attributes} == {"model_name": "smol"}
    assert found["natterjack_num_requests_open"].gauge.data_points[0].as_double == 2
    (latency,) = found["natterjack_time_to_first_token_seconds"].histogram.data_points
    assert (latency.count, latency.sum) == (2, pytest.approx(2.004))
    assert sum(latency.bucket_counts) == 2
    assert len(latency.bucket_counts) == len(latency.explicit_bounds) + 1
    assert not latency.HasField("min")
    assert [e.trace_id.hex() for e in latency.exemplars] == [TRACE]


async def test_a_missing_collector_delays_nothing() -> None:
    settings = TelemetrySettings(otlp_endpoint="http://127.0.0.1:1", otlp_metrics_period_s=0.01)
    async with asyncio.timeout(10), pushing_metrics(settings, Metrics("smol"), RESOURCE):
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "settings",
    [TelemetrySettings(), TelemetrySettings(otlp_endpoint="http://127.0.0.1:1", otlp_metrics_period_s=0)],
)
async def test_nothing_is_sent_unless_it_is_wanted(settings: TelemetrySettings) -> None:
    before = asyncio.all_tasks()
    async with pushing_metrics(settings, Metrics("smol"), RESOURCE):
        assert asyncio.all_tasks() == before
