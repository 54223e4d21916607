"""Service level objectives, such as `ttft:100`, and whether a request met them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.bench.record import RequestRecord

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Objective:
    """An upper limit, in milliseconds, on one latency of a request."""

    name: str
    limit_ms: float

    def is_met(self, record: RequestRecord) -> bool:
        """Tell whether a successful request stayed within the limit; one token has no time per output token."""
        value_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}[self.name]
        return value_s * 1e3 <= self.limit_ms


def parse_objectives(texts: Iterable[str]) -> tuple[Objective, ...]:
    """Return the objectives in `NAME:MILLISECONDS` texts; several may share one text. Raises ValueError."""
    objectives: dict[str, Objective] = {}
    for text in (word for words in texts for word in words.split()):
        name, _, limit = text.partition(":")
        try:
            limit_ms = float(limit)
        except ValueError:
            limit_ms = -1.0
        if name not in OBJECTIVES or not limit_ms >= 0:
            raise ValueError(f"{text!r} is no objective: write {', '.join(OBJECTIVES)} with milliseconds, as ttft:100.")
        objectives[name] = Objective(name, limit_ms)
    return tuple(objectives.values())


def count_good(records: Iterable[RequestRecord], objectives: tuple[Objective, ...]) -> int:
    """Return how many requests succeeded and met every objective."""
    return sum(r.is_success and all(objective.is_met(r) for objective in objectives) for r in records)
