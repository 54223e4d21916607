"""How fast a set of requests was answered: percentiles of the usual latencies, and throughput. Pure."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.recording.outcomes import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds by percentile: time to first token, between tokens, end to end; and generated tokens per second."""

    num_requests: int
    first_token_s: tuple[float, ...]
    between_tokens_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    tokens_per_s: float

    def rows(self) -> dict[str, float]:
        """Return every figure under its name, such as `first_token_s.p90`."""
        rows: dict[str, float] = {}
        for name in ("first_token_s", "between_tokens_s", "end_to_end_s"):
            for percentile, value in zip(PERCENTILES, getattr(self, name), strict=False):
                rows[f"{name}.p{percentile}"] = value
        return {**rows, "tokens_per_s": self.tokens_per_s}


def measure(outcomes: Iterable[Outcome]) -> Latencies:
    """Return the latencies of the requests that ended without an error."""
    done = [o for o in outcomes if o.is_final and o.error is None and o.asked_s is not None and o.ended_s is not None]
    first = [o.first_token_s - o.asked_s for o in done if o.first_token_s is not None and o.asked_s is not None]
    ends = [o.ended_s - o.asked_s for o in done if o.ended_s is not None and o.asked_s is not None]
    between = [gap for o in done for gap in _gaps(o.token_times)]
    num_tokens = sum(o.num_tokens for o in done)
    span_s = max((o.ended_s or 0.0 for o in done), default=0.0) - min((o.asked_s or 0.0 for o in done), default=0.0)
    return Latencies(
        len(done), percentiles(first), percentiles(between), percentiles(ends), num_tokens / span_s if span_s else 0.0
    )


def _gaps(times: Sequence[tuple[float, int]]) -> list[float]:
    """Return the time per token: several tokens in one chunk share the time since the chunk before."""
    return [
        (at_s - before_s) / number for (before_s, _), (at_s, number) in itertools.pairwise(times) for _ in range(number)
    ]


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """Return the percentiles of PERCENTILES (nearest rank); nothing for no values."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES) if ordered else ()
