"""How well a second pipeline agrees with the live one, request by request, in numbers that do not grow. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from services.recording.comparison import Comparison, Difference, Rules, compare
from services.recording.latency import percentiles
from services.recording.outcomes import Outcome

MAX_DIFFERENCES = 20
MAX_LATENCIES = 2000
LOAD_ERRORS = frozenset({"queue_full", "service_unavailable"})
"""How a second pipeline that has no room answers: that says nothing of its tokens."""

Verdict = Literal["agreed", "different", "unpromised"]


@dataclass(slots=True)
class Agreement:
    """The requests that both pipelines have answered, and those that could not be compared, by reason.

    `num_timed` of the agreed ones were cancelled or ran out of time, and agree as far as both went. Tokens agree up to
    the first that differs.
    """

    rules: Rules = field(default_factory=Rules)
    verdicts: "Counter[Verdict]" = field(default_factory=Counter)
    dropped: "Counter[str]" = field(default_factory=Counter)
    whats: "Counter[str]" = field(default_factory=Counter)
    num_timed: int = 0
    num_tokens: int = 0
    num_tokens_agreed: int = 0
    differences: "deque[Difference]" = field(default_factory=lambda: deque(maxlen=MAX_DIFFERENCES))
    live_s: "deque[float]" = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    other_s: "deque[float]" = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))

    @property
    def num_compared(self) -> int:
        """Requests that both have answered."""
        return sum(self.verdicts.values())

    @property
    def num_dropped(self) -> int:
        """Requests that were chosen, and not compared."""
        return sum(self.dropped.values())

    @property
    def token_share(self) -> float:
        """The part of the tokens that agree, 0 to 1."""
        return self.num_tokens_agreed / self.num_tokens if self.num_tokens else 1.0

    def drop(self, reason: str) -> None:
        """Count a chosen request that is not compared."""
        self.dropped[reason] += 1

    def take(self, live: Outcome, other: Outcome) -> Verdict | None:
        """Compare a request's two outcomes; None when the second pipeline had no room for it."""
        if other.error is not None and other.error.code in LOAD_ERRORS and live.error is None:
            self.drop(other.error.code)
            return None
        comparison = compare([live], {live.request_id: other}, self.rules)
        verdict = _verdict(comparison)
        self.verdicts[verdict] += 1
        self.num_timed += len(comparison.timed) if verdict == "agreed" else 0
        self.whats.update(d.what for d in (*comparison.differences, *comparison.unpromised))
        self.differences.extend(comparison.differences or comparison.unpromised[:1])
        self._count_tokens(live, other, only_common=bool(comparison.timed))
        for outcome, latencies in ((live, self.live_s), (other, self.other_s)):
            if outcome.ended_s is not None and outcome.asked_s is not None:
                latencies.append(outcome.ended_s - outcome.asked_s)
        return verdict

    def _count_tokens(self, live: Outcome, other: Outcome, *, only_common: bool) -> None:
        for index in live.choices.keys() | other.choices.keys():
            ours, others = (o.choices[index].token_ids if index in o.choices else [] for o in (live, other))
            self.num_tokens_agreed += _common_prefix(ours, others)
            self.num_tokens += min(len(ours), len(others)) if only_common else max(len(ours), len(others))


def _verdict(comparison: Comparison) -> Verdict:
    if comparison.differences:
        return "different"
    return "unpromised" if comparison.unpromised else "agreed"


def _common_prefix(ours: Iterable[int], others: Iterable[int]) -> int:
    number = 0
    for mine, theirs in zip(ours, others, strict=False):
        if mine != theirs:
            break
        number += 1
    return number


def as_json(agreement: Agreement) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "equal": agreement.num_compared > 0 and agreement.verdicts["different"] == 0,
        "num_compared": agreement.num_compared,
        **{f"num_{verdict}": agreement.verdicts[verdict] for verdict in ("agreed", "different", "unpromised")},
        "num_ended_by_time": agreement.num_timed,
        "num_dropped": agreement.num_dropped,
        "dropped": dict(agreement.dropped),
        "num_tokens": agreement.num_tokens,
        "num_tokens_agreed": agreement.num_tokens_agreed,
        "token_share": agreement.token_share,
        "differences_by_kind": dict(agreement.whats),
        "differences": [asdict(difference) for difference in agreement.differences],
        "end_to_end_s": {"live": _percentiles(agreement.live_s), "shadow": _percentiles(agreement.other_s)},
        "is_same_engine": agreement.rules.is_same_engine,
    }


def _percentiles(values: "deque[float]") -> Mapping[str, float]:
    return dict(zip(("p50", "p90", "p99"), percentiles(list(values)), strict=False))


def as_rows(agreement: Agreement, num_open: int) -> list[tuple[str, str]]:
    """Return the live table's rows: what, and how much."""
    compared = agreement.num_compared
    rows = [
        ("compared", f"{compared} requests, {num_open} running"),
        ("agreed", _of(agreement.verdicts["agreed"], compared)),
        ("different", _of(agreement.verdicts["different"], compared)),
    ]
    if not agreement.rules.is_same_engine:
        rows.append(("unpromised", f"{_of(agreement.verdicts['unpromised'], compared)}, for the engines differ"))
    rows.append(("tokens agreed", f"{_of(agreement.num_tokens_agreed, agreement.num_tokens)}"))
    if agreement.dropped:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(agreement.dropped.items()))
        rows.append(("not compared", f"{agreement.num_dropped} requests: {reasons}"))
    if agreement.whats:
        rows.append(("what differs", ", ".join(f"{what} {n}" for what, n in agreement.whats.most_common(6))))
    live, other = _percentiles(agreement.live_s), _percentiles(agreement.other_s)
    if live and other:
        rows.append(("end to end p50", f"live {live['p50']:.3f} s, shadow {other['p50']:.3f} s"))
    return rows


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.2%})" if whole else "")
