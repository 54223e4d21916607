"""Reads Prometheus pages as Prometheus would, for tests that compare what was counted with what was seen."""

import bisect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import httpx

_SAMPLE = re.compile(r"^(?P<name>[a-z0-9_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass
class Pages:
    """The samples of every service of a deployment at one moment."""

    samples: list[Sample] = field(default_factory=list)

    @classmethod
    async def read(cls, urls: Iterable[str]) -> "Pages":
        async with httpx.AsyncClient() as client:
            return cls([sample for url in urls for sample in parse((await client.get(f"{url}/metrics")).text)])

    def of(self, name: str, **labels: str) -> list[Sample]:
        full = f"natterjack_{name}"
        return [s for s in self.samples if s.name == full and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all services; fails when nobody has the metric."""
        found = self.of(name, **labels)
        assert found, f"nobody has {name} {labels}"
        return sum(sample.value for sample in found)

    def bucket(self, name: str, quantile: float, since: "Pages | None" = None) -> tuple[float, float]:
        """Return the bounds of the bucket that holds a quantile, and allow for one neighbour on each side."""
        counts: dict[float, float] = {}
        for sign, pages in ((1, self), (-1, since or Pages())):
            for sample in pages.of(f"{name}_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sign * sample.value
        bounds = sorted(counts)
        rank = math.ceil(quantile * counts[math.inf])
        index = bisect.bisect_left([counts[bound] for bound in bounds], rank)
        return (bounds[index - 2] if index > 1 else 0.0), bounds[min(index + 1, len(bounds) - 1)]


def parse(text: str) -> list[Sample]:
    """Return the samples of a page; fails at a line that is none."""
    samples = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = _SAMPLE.match(line)
            assert match, line
            samples.append(Sample(match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])))
    return samples
