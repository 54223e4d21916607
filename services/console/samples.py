"""What the instances' samples say of the last seconds: rates, percentiles, sums of gauges. Pure; time is an argument.

Counters are kept as differences between one instance's successive samples, so that a restart (another incarnation,
which counts from zero) loses nothing and never shows a negative rate. Of an instance that was counting before we came,
the first sample is only where counting begins.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from schemas.telemetry import MetricSample, SampledHistogram

WINDOW_S = 5.0
"""What a rate or a percentile is of."""
FORGET_S = 30.0
MAX_INSTANCES = 1000

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
Buckets = dict[float, int]
"""Observations by upper bound; infinity for those above all."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What one instance's counters and histograms gained until `time_s`."""

    time_s: float
    counters: Mapping[Key, float]
    histograms: Mapping[str, Buckets]


@dataclass(slots=True)
class Source:
    """One instance: its newest sample, and its growth over the window."""

    sample: MetricSample
    heard_s: float
    since_s: float
    growth: deque[Growth] = field(default_factory=deque)


class Samples:
    """The newest samples of every instance."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def add(self, sample: MetricSample, now_s: float) -> None:
        """Take in a sample that came at `now_s`."""
        source = self._sources.get(sample.instance)
        if source is None:
            if len(self._sources) < MAX_INSTANCES:
                self._sources[sample.instance] = Source(sample, now_s, now_s)
            return
        before = source.sample if source.sample.incarnation == sample.incarnation else None
        source.growth.append(Growth(now_s, _gained(before, sample), _observed(before, sample)))
        source.sample, source.heard_s = sample, now_s
        while source.growth and source.growth[0].time_s <= now_s - WINDOW_S:
            source.growth.popleft()

    def forget_silent(self, now_s: float) -> None:
        """Drop instances that have said nothing for a while."""
        for name in [name for name, source in self._sources.items() if now_s - source.heard_s > FORGET_S]:
            del self._sources[name]

    # ---- of all instances, of a role's or of one

    def rate(self, name: str, now_s: float, *, role: str = "", instance: str = "", **labels: str) -> float:
        """Return a counter's gain per second, summed over instances and over labels that are not named."""
        wanted = set(labels.items())
        total = 0.0
        for source in self._recent(now_s, role, instance):
            gained = sum(
                value
                for growth in source.growth
                for (key, its_labels), value in growth.counters.items()
                if key == name and wanted.issubset(its_labels) and growth.time_s > now_s - WINDOW_S
            )
            total += gained / min(WINDOW_S, max(1.0, now_s - source.since_s))
        return total

    def gauge(self, name: str, now_s: float, *, role: str = "", instance: str = "") -> float:
        """Return the sum of a gauge's newest values."""
        return sum(value for _, value in self.gauges(name, now_s, role=role, instance=instance))

    def gauges(
        self, name: str, now_s: float, *, role: str = "", instance: str = ""
    ) -> Iterator[tuple[dict[str, str], float]]:
        """Yield a gauge's newest values with their labels."""
        for source in self._recent(now_s, role, instance):
            for value in source.sample.values:
                if value.name == name:
                    yield value.labels, value.value

    def percentiles(self, name: str, percents: Iterable[float], now_s: float) -> list[float | None]:
        """Return percentiles of the window's observations over all instances; None where there were none."""
        merged: Buckets = {}
        for source in self._recent(now_s, "", ""):
            for growth in source.growth:
                if growth.time_s > now_s - WINDOW_S:
                    for bound, count in growth.histograms.get(name, {}).items():
                        merged[bound] = merged.get(bound, 0) + count
        return [percentile(merged, percent) for percent in percents]

    def _recent(self, now_s: float, role: str, instance: str) -> Iterator[Source]:
        for name, source in self._sources.items():
            is_wanted = role in ("", source.sample.role) and instance in ("", name)
            if is_wanted and now_s - source.heard_s <= WINDOW_S:
                yield source


def percentile(buckets: Buckets, percent: float) -> float | None:
    """Return a percentile, interpolated within its bucket as Prometheus' histogram_quantile does."""
    total = sum(buckets.values())
    if not total:
        return None
    bounds = sorted(bound for bound, count in buckets.items())
    cumulated: list[int] = []
    for bound in bounds:
        cumulated.append((cumulated[-1] if cumulated else 0) + buckets[bound])
    rank = percent / 100 * total
    place = min(bisect_left(cumulated, max(rank, 1e-9)), len(bounds) - 1)
    below = cumulated[place - 1] if place else 0
    lower = bounds[place - 1] if place else 0.0
    if bounds[place] == float("inf"):
        return lower
    return lower + (bounds[place] - lower) * (rank - below) / (cumulated[place] - below)


def _gained(before: MetricSample | None, after: MetricSample) -> dict[Key, float]:
    old = _counters(before) if before is not None else {}
    gained = {key: value - old.get(key, 0.0) for key, value in _counters(after).items()}
    return {key: value for key, value in gained.items() if value > 0}


def _counters(sample: MetricSample) -> dict[Key, float]:
    return {
        (value.name, tuple(sorted(value.labels.items()))): value.value
        for value in sample.values
        if value.name.endswith(("_total", "_count"))
    }


def _observed(before: MetricSample | None, after: MetricSample) -> dict[str, Buckets]:
    """Return the new observations; a bucket carries its lower neighbour with a zero, which interpolation needs."""
    old = {_key(histogram): histogram.counts for histogram in before.histograms} if before is not None else {}
    observed: dict[str, Buckets] = {}
    for histogram in after.histograms:
        known = old.get(_key(histogram), (0,) * len(histogram.counts))
        buckets = observed.setdefault(histogram.name, {})
        bounds = (*histogram.bounds, float("inf"))
        if len(known) != len(histogram.counts) or len(bounds) != len(known):
            continue  # of another version
        for place, (was, now) in enumerate(zip(known, histogram.counts, strict=True)):
            if now > was:
                buckets[bounds[place]] = buckets.get(bounds[place], 0) + now - was
                if place:
                    buckets.setdefault(bounds[place - 1], 0)
    return observed


def _key(histogram: SampledHistogram) -> Key:
    return histogram.name, tuple(sorted(histogram.labels.items()))
