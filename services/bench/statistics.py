"""Mean, median, deviation and percentiles, as numpy computes them by default. Pure, and quick to import."""

import math
from collections.abc import Sequence

PERCENTILES = (90.0, 95.0, 99.0)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values, between two of them by linear interpolation; 0 of none."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def latency_figures(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Return `mean_NAME_ms`, `median_NAME_ms`, `std_NAME_ms` (of the population) and `pNN_NAME_ms`; 0 of no values."""
    ordered = sorted(value * 1e3 for value in values_s)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered) if ordered else 0.0
    figures = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(variance),
    }
    return figures | {f"p{percent:g}_{name}_ms": percentile(ordered, percent) for percent in PERCENTILES}
