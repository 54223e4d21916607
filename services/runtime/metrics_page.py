"""The page that Prometheus reads: its text format 0.0.4, or OpenMetrics 1.0 with exemplars for those that accept it."""

import math
from collections.abc import Iterator, Mapping

from services.runtime.metric_catalogue import Metric
from services.runtime.metrics import STARTED_S, Exemplar, Histogram, Metrics, Sample, cpu_seconds, resident_bytes

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def metrics_page(metrics: Metrics, accept: str = "") -> tuple[bytes, str]:
    """Return the page and its content type, in the format that the `Accept` header allows."""
    is_open = "application/openmetrics-text" in accept
    lines: list[str] = []
    for name, metric, samples in metrics.families():
        lines += _header(name, metric, is_open)
        for sample in samples:
            lines += _sample_lines(name, sample, is_open)
    lines += _process_lines(is_open)
    if is_open:
        lines.append("# EOF")
    return "\n".join([*lines, ""]).encode(), OPEN_METRICS if is_open else TEXT


def _header(name: str, metric: Metric, is_open: bool) -> Iterator[str]:
    family = name.removesuffix("_total") if is_open and metric.kind == "counter" else name
    yield f"# HELP {family} {metric.text}"
    yield f"# TYPE {family} {metric.kind}"


def _sample_lines(name: str, sample: Sample, is_open: bool) -> Iterator[str]:
    if not isinstance(sample.value, Histogram):
        yield f"{name}{_labels(sample.labels)} {_number(sample.value)}"
        return
    histogram, count = sample.value, 0
    for bucket, bound in enumerate((*histogram.bounds, math.inf)):
        count += histogram.counts[bucket]
        exemplar = histogram.exemplars.get(bucket) if is_open else None
        yield f"{name}_bucket{_labels(sample.labels, le=_number(bound))} {count}{_exemplar(exemplar)}"
    labels = _labels(sample.labels)
    yield f"{name}_sum{labels} {_number(histogram.total)}"
    yield f"{name}_count{labels} {count}"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    return f' # {{trace_id="{exemplar.trace_id}"}} {_number(exemplar.value)} {exemplar.time_s:.3f}'


def _process_lines(is_open: bool) -> Iterator[str]:
    """The facts of a process that every Prometheus client library reports under these names."""
    yield f"# TYPE process_cpu_seconds{'' if is_open else '_total'} counter"
    yield f"process_cpu_seconds_total {_number(cpu_seconds())}"
    yield "# TYPE process_resident_memory_bytes gauge"
    yield f"process_resident_memory_bytes {resident_bytes()}"
    yield "# TYPE process_start_time_seconds gauge"
    yield f"process_start_time_seconds {_number(STARTED_S)}"


def _labels(labels: Mapping[str, str], **more: str) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in (*labels.items(), *more.items())) + "}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
