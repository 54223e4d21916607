"""Sends a process's metrics to an OpenTelemetry collector, by OTLP/HTTP. An edge module.

The numbers and names are those of the Prometheus page. They are read on the event loop and sent on a thread; a
collector that does not answer costs a warning a minute, and nothing else.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from services.runtime import metrics as own
from services.runtime.metric_catalogue import Metric
from services.runtime.settings import TelemetrySettings

EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_TIMEOUT_S = 1.0
"""A process that ends does not wait long for a collector."""
SCOPE = InstrumentationScope("natterjack")
CUMULATIVE = otlp.AggregationTemporality.CUMULATIVE


@contextlib.asynccontextmanager
async def pushing_metrics(settings: TelemetrySettings, metrics: own.Metrics, resource: Resource) -> AsyncIterator[None]:
    """Send `metrics` every `otlp_metrics_period_s` while the block runs, and once at its end."""
    if not settings.otlp_endpoint or not settings.otlp_metrics_period_s:
        yield
        return
    exporter = _exporter(settings.otlp_endpoint)
    pushing = asyncio.create_task(_push_for_ever(exporter, metrics, resource, settings.otlp_metrics_period_s))
    try:
        yield
    finally:
        pushing.cancel()
        await asyncio.wait({pushing})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EXPORT_TIMEOUT_S):
                await asyncio.to_thread(exporter.export, metrics_data(metrics, resource), LAST_EXPORT_TIMEOUT_S * 1e3)
        exporter.shutdown(timeout_millis=0)


def _exporter(endpoint: str) -> otlp.MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # only when it is wanted

    return OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=EXPORT_TIMEOUT_S)


async def _push_for_ever(
    exporter: otlp.MetricExporter, metrics: own.Metrics, resource: Resource, period_s: float
) -> None:
    while True:
        await asyncio.sleep(period_s)
        await asyncio.to_thread(exporter.export, metrics_data(metrics, resource))  # logs its own failures


def metrics_data(metrics: own.Metrics, resource: Resource) -> otlp.MetricsData:
    """Return everything that `metrics` holds now, as OpenTelemetry's exporters take it."""
    now_ns = time.time_ns()
    points = [_metric(name, metric, samples, now_ns) for name, metric, samples in metrics.families()]
    scope = otlp.ScopeMetrics(SCOPE, points, "")
    return otlp.MetricsData([otlp.ResourceMetrics(resource, [scope], "")])


def _metric(name: str, metric: Metric, samples: Sequence[own.Sample], now_ns: int) -> otlp.Metric:
    numbers = [
        _number(sample, sample.value, now_ns) for sample in samples if not isinstance(sample.value, own.Histogram)
    ]
    unit = "s" if "_seconds" in name else ""
    if metric.kind == "histogram":
        data: otlp.Histogram | otlp.Sum | otlp.Gauge = otlp.Histogram(
            [_histogram(s, s.value, now_ns) for s in samples if isinstance(s.value, own.Histogram)], CUMULATIVE
        )
    elif metric.kind == "counter":
        data = otlp.Sum(numbers, CUMULATIVE, is_monotonic=True)
    else:
        data = otlp.Gauge(numbers)
    return otlp.Metric(name, metric.text, unit, data)


def _number(sample: own.Sample, value: float, now_ns: int) -> otlp.NumberDataPoint:
    return otlp.NumberDataPoint(dict(sample.labels), _started_ns(), now_ns, float(value))


def _histogram(sample: own.Sample, histogram: own.Histogram, now_ns: int) -> otlp.HistogramDataPoint:
    return otlp.HistogramDataPoint(
        dict(sample.labels),
        _started_ns(),
        now_ns,
        sum(histogram.counts),
        histogram.total,
        list(histogram.counts),
        histogram.bounds,
        None,  # type: ignore[arg-type]  # extremes are not kept, and the encoder leaves out what is None
        None,  # type: ignore[arg-type]
        [_exemplar(exemplar) for exemplar in histogram.exemplars.values()],
    )


def _exemplar(exemplar: own.Exemplar) -> Exemplar:
    return Exemplar({}, exemplar.value, int(exemplar.time_s * 1e9), 0, int(exemplar.trace_id, 16))


def _started_ns() -> int:
    return int(own.STARTED_S * 1e9)
