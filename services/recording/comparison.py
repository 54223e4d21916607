"""Whether two sets of outcomes are the same: tokens and text exactly, the rest by stated rules. Pure.

- Token ids, text, finish and stop reasons, the number of choices, prompt and completion tokens: equal.
- Errors: the same code and parameter.
- Cached tokens: depend on what ran before, so any number below the prompt's length is right.
- Logprobs: within `Rules.logprob` of each other.
- A recorded request that ended because of time or load (cancelled, past its deadline, no room) need not end at the same
  token again, or in this way: what both have must agree.
- Between two engines that do not promise each other's tokens: what follows from the tokens alone (ids, text, logprobs,
  where and why a choice ended) is told apart, as unpromised; ends, errors, prompts and the number of choices are equal.
- Latencies and throughput: reported, and a difference only where a tolerance was asked for.
"""

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.recording.latency import Latencies, measure
from services.recording.outcomes import ChoiceOutcome, Outcome

if TYPE_CHECKING:
    from services.recording.schedule import ScheduleComparison

TIMED_ERRORS = frozenset({"cancelled", "deadline_exceeded", "queue_full", "service_unavailable"})
TOKENS_DECIDE = frozenset(
    {"tokens", "text", "logprob", "prompt_logprob", "tool_calls", "finish_reason", "stop_reason"}
    | {"usage.completion_tokens", "embedding"}
)
"""What another engine may do otherwise."""
CONTEXT = 24
"""Characters, or tokens, that are shown around the first difference."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What counts: `text` false where either recording has no text, `tokens` false where it has no ids.

    `logprob`: tolerated difference of log-probabilities. `latency`: tolerated relative change for the worse of any
    percentile and of throughput (0.1 is 10 %); None: not judged. `is_exact`: nothing was left to time or load, as when
    one service is fed alone. `is_same_engine`: tokens are promised to be the same.
    """

    text: bool = True
    tokens: bool = True
    logprob: float = 0.01
    latency: float | None = None
    is_exact: bool = False
    is_same_engine: bool = True


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same. `position` is the first differing one, in tokens or characters."""

    request_id: str
    what: str
    expected: Any
    found: Any
    choice: int | None = None
    position: int | None = None


@dataclass(slots=True)
class Comparison:
    """What was compared (`unit`), what differs, and what could not be compared and why.

    `unpromised` differs too, but nobody promised otherwise.
    """

    num_compared: int = 0
    num_tokens: int = 0
    unit: str = "requests"
    differences: list[Difference] = field(default_factory=list)
    unpromised: list[Difference] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    timed: list[str] = field(default_factory=list)
    before: Latencies | None = None
    after: Latencies | None = None
    rules: Rules = field(default_factory=Rules)
    schedule: "ScheduleComparison | None" = None

    @property
    def is_usable(self) -> bool:
        """Tell whether anything could be compared."""
        return self.num_compared > 0

    def file(self, found: Iterable[Difference]) -> None:
        """Take what differs, each where it belongs."""
        for difference in found:
            is_promised = self.rules.is_same_engine or difference.what not in TOKENS_DECIDE
            (self.differences if is_promised else self.unpromised).append(difference)


def compare(
    expected: Sequence[Outcome], found: Mapping[str, Outcome], rules: Rules, skipped: Mapping[str, str] | None = None
) -> Comparison:
    """Compare outcomes with those that `found` holds under the expected request's id.

    `skipped` are requests that are known not to be comparable, with the reason.
    """
    result = Comparison(rules=rules, skipped=dict(skipped or {}))
    pairs: list[tuple[Outcome, Outcome]] = []
    for outcome in expected:
        other = found.get(outcome.request_id)
        if outcome.request_id in result.skipped:
            continue
        if not outcome.is_final:
            result.skipped[outcome.request_id] = "the recording does not hold its end"
        elif other is None:
            result.num_compared += 1
            result.differences.append(Difference(outcome.request_id, "presence", "an outcome", "none"))
        else:
            pairs.append((outcome, other))
    for outcome, other in pairs:
        result.num_compared += 1
        result.num_tokens += outcome.num_tokens
        _compare_pair(outcome, other, result)
    result.before, result.after = measure(a for a, _ in pairs), measure(b for _, b in pairs)
    result.differences += _latency_differences(result)
    return result


def _compare_pair(expected: Outcome, found: Outcome, result: Comparison) -> None:
    request_id, rules = expected.request_id, result.rules
    if not found.is_final:
        result.differences.append(Difference(request_id, "end", ending(expected), "no end"))
        result.file(_compare_choices(expected, found, rules, only_common=not rules.is_exact))
        return
    may_end_otherwise = found.error is None or found.error.code in TIMED_ERRORS
    if not rules.is_exact and _is_timed(expected) and may_end_otherwise:
        result.timed.append(request_id)
        result.file(_compare_choices(expected, found, rules, only_common=True))
        return
    if ending(expected) != ending(found):
        result.differences.append(Difference(request_id, "end", ending(expected), ending(found)))
        return
    result.file(_compare_choices(expected, found, rules, only_common=False))
    result.file(_compare_usage(expected, found, rules))


def _is_timed(expected: Outcome) -> bool:
    """Tell whether the recorded end could as well have been a little earlier or later."""
    has_timed_error = expected.error is not None and expected.error.code in TIMED_ERRORS
    return has_timed_error or expected.cancelled_at is not None


def ending(outcome: Outcome) -> str:
    if outcome.error is None:
        return "finished"
    param = f" ({outcome.error.param})" if outcome.error.param else ""
    return f"{'refused' if outcome.is_refused else 'error'}: {outcome.error.code}{param}"


def _compare_choices(expected: Outcome, found: Outcome, rules: Rules, *, only_common: bool) -> Iterable[Difference]:
    for index in sorted(expected.choices.keys() | found.choices.keys()):
        ours, other = expected.choices.get(index), found.choices.get(index)
        if ours is None or other is None:
            if not only_common:
                yield Difference(expected.request_id, "choice", ours is not None, other is not None, index)
            continue
        yield from _compare_choice(expected.request_id, index, ours, other, rules, only_common)


def _compare_choice(
    request_id: str, index: int, ours: ChoiceOutcome, other: ChoiceOutcome, rules: Rules, only_common: bool
) -> Iterable[Difference]:
    if rules.tokens and (difference := first_difference(ours.token_ids, other.token_ids, only_common)) is not None:
        shown = (around(ours.token_ids, difference), around(other.token_ids, difference))
        yield Difference(request_id, "tokens", *shown, index, difference)
    if rules.text and (difference := first_difference(ours.text, other.text, only_common)) is not None:
        yield Difference(
            request_id, "text", around(ours.text, difference), around(other.text, difference), index, difference
        )
    for what, mine, theirs in (
        ("logprob", ours.logprobs, other.logprobs),
        ("prompt_logprob", ours.prompt_logprobs, other.prompt_logprobs),
    ):
        if (apart := _apart(mine, theirs, rules.logprob)) is not None:
            yield Difference(request_id, what, mine[apart], theirs[apart], index, apart)
    if only_common:
        return
    if rules.text and ours.embedding != other.embedding:
        yield embeddings_apart(request_id, index, ours.embedding, other.embedding)
    if rules.text and ours.calls != other.calls:
        yield Difference(request_id, "tool_calls", [*ours.calls.values()], [*other.calls.values()], index)
    if ours.finish_reason != other.finish_reason:
        yield Difference(request_id, "finish_reason", ours.finish_reason, other.finish_reason, index)
    if ours.stop_reason != other.stop_reason and (rules.text or not isinstance(ours.stop_reason, str)):
        yield Difference(request_id, "stop_reason", ours.stop_reason, other.stop_reason, index)


def embeddings_apart(request_id: str, index: int, ours: str | None, other: str | None) -> Difference:
    """Return how two embeddings (base64 of little-endian float32) differ, from the first differing value on."""
    mine, theirs = _floats(ours), _floats(other)
    number = first_difference(mine, theirs, only_common=False)
    shown = (around(mine, number or 0)[:CONTEXT], around(theirs, number or 0)[:CONTEXT])
    return Difference(request_id, "embedding", *shown, index, number)


def _floats(embedding: str | None) -> list[float]:
    raw = base64.b64decode(embedding or "")
    return [value for (value,) in struct.iter_unpack("<f", raw[: len(raw) // 4 * 4])]


def _apart(ours: Sequence[float], other: Sequence[float], tolerance: float) -> int | None:
    """Return where two logprobs are too far from each other for the first time."""
    pairs = enumerate(zip(ours, other, strict=False))
    return next((number for number, (a, b) in pairs if abs(a - b) > tolerance), None)


def first_difference(ours: Sequence[Any], other: Sequence[Any], only_common: bool) -> int | None:
    """Return the first position at which two sequences differ, their common length when one goes on; None: equal.

    With `only_common`, one may go on where the other ends.
    """
    common = min(len(ours), len(other))
    if ours[:common] != other[:common]:
        return next(number for number in range(common) if ours[number] != other[number])
    return None if only_common or len(ours) == len(other) else common


def around(sequence: Sequence[Any], position: int) -> Any:
    """Return what stands at a position, with a little before it."""
    return sequence[max(0, position - CONTEXT // 2) : position + CONTEXT]


def _compare_usage(expected: Outcome, found: Outcome, rules: Rules) -> Iterable[Difference]:
    ours, other = expected.usage, found.usage
    if ours is None or other is None:
        return
    for name in ("prompt_tokens", "completion_tokens", *(("cached_tokens",) if rules.is_exact else ())):
        if getattr(ours, name) != getattr(other, name):
            yield Difference(expected.request_id, f"usage.{name}", getattr(ours, name), getattr(other, name))
    if not 0 <= other.cached_tokens < max(1, other.prompt_tokens):
        rule = f"0 to {other.prompt_tokens - 1}"
        yield Difference(expected.request_id, "usage.cached_tokens", rule, other.cached_tokens)


def _latency_differences(result: Comparison) -> Iterable[Difference]:
    tolerance, before, after = result.rules.latency, result.before, result.after
    if tolerance is None or before is None or after is None:
        return
    ours, others = before.rows(), after.rows()
    for name in ours.keys() & others.keys():
        is_rate = name == "tokens_per_s"
        limit = ours[name] * (1 - tolerance if is_rate else 1 + tolerance)
        if others[name] < limit if is_rate else others[name] > limit:
            yield Difference("", f"latency {name}", f"{'≥' if is_rate else '≤'} {limit:.4g}", round(others[name], 6))
