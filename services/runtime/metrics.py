"""Counters, gauges and histograms of one process.

Owns the numbers; metric_catalogue.py says which there are, metrics_page.py and otlp_metrics.py how they are shown.
Gauges are read when they are shown, from the state that they describe, so that they cannot drift from it. Counting
costs well under a microsecond: no locks, for it is done from one thread, and the labelled children are looked up once,
by whoever counts.
"""

import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from services.runtime.metric_catalogue import METRICS, Metric

PREFIX = "natterjack_"

LabelValues = tuple[str, ...]
Read = Callable[[], Mapping[LabelValues, float]]


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count."""
        self.value += amount


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation of a bucket and the trace that shows how it came about; `time_s` is Unix time."""

    trace_id: str
    value: float
    time_s: float


class Histogram:
    """Observations by bucket; `counts` has one more entry than `bounds`, for what is above all."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Count `value`, several times if many had it at once; the trace is remembered as its bucket's latest."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += times
        self.total += value * times
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, value, time.time())


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric's value under some labels, the model's name among them."""

    labels: Mapping[str, str]
    value: float | Histogram


C = TypeVar("C", Counter, Histogram)


class Metrics:
    """What one process counts and measures; every sample carries the model's name."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._counters: dict[str, dict[LabelValues, Counter]] = {}
        self._histograms: dict[str, dict[LabelValues, Histogram]] = {}
        self._reads: dict[str, list[Read]] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        """Return the counter with these label values, in the catalogue's order."""
        metric = _metric(name, "counter")
        return _child(self._counters, name, metric, labels, Counter)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """Return the histogram with these label values, in the catalogue's order."""
        metric = _metric(name, "histogram")
        return _child(self._histograms, name, metric, labels, lambda: Histogram(metric.buckets))

    def gauge(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Show `read()` whenever the page is made."""
        self.gauges(name, lambda: {labels: read()})

    def gauges(self, name: str, read: Read) -> None:
        """Show one sample for each entry of `read()`, by label values; also for counters that live in some state."""
        if name not in METRICS:
            raise KeyError(f"{name} is not in the catalogue")
        self._reads.setdefault(name, []).append(read)

    def families(self) -> Iterator[tuple[str, Metric, list[Sample]]]:
        """Yield every metric that has samples, in the catalogue's order, by its name with the prefix."""
        for name, metric in METRICS.items():
            if samples := [Sample(self._labels(metric, values), value) for values, value in self._values(name)]:
                yield PREFIX + name, metric, samples

    def _values(self, name: str) -> Iterator[tuple[LabelValues, float | Histogram]]:
        for values, counter in self._counters.get(name, {}).items():
            yield values, counter.value
        yield from self._histograms.get(name, {}).items()
        for read in self._reads.get(name, ()):
            yield from read().items()

    def _labels(self, metric: Metric, values: LabelValues) -> dict[str, str]:
        return {"model_name": self._model, **dict(zip(metric.labels, values, strict=True))}


def _metric(name: str, kind: str) -> Metric:
    metric = METRICS[name]
    if metric.kind != kind:
        raise TypeError(f"{name} is a {metric.kind}, not a {kind}")
    return metric


def _child(
    families: dict[str, dict[LabelValues, C]], name: str, metric: Metric, labels: LabelValues, make: Callable[[], C]
) -> C:
    family = families.get(name)
    if family is None:
        family = families[name] = {(value,): make() for value in metric.known}
    child = family.get(labels)
    if child is None:
        if len(labels) != len(metric.labels):
            raise TypeError(f"{name} has the labels {metric.labels}")
        child = family[labels] = make()
    return child


STARTED_S = time.time()
"""When this process began, near enough."""


def cpu_seconds() -> float:
    """Return the CPU time that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_bytes() -> int:
    """Return the memory that this process holds."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):  # not Linux: the peak has to do, which is in kilobytes elsewhere as well
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
