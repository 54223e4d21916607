"""A comparison in words for a terminal, and as JSON. Pure."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from services.recording import schedule
from services.recording.comparison import Comparison, Difference

MAX_SHOWN = 20
UNITS = {"text": "character", "embedding": "value", "schedule: order": "rank", "schedule: batch": "step"}
"""What a position counts, where it is not tokens."""


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "equal": comparison.is_usable and not comparison.differences,
        "num_compared": comparison.num_compared,
        "num_tokens": comparison.num_tokens,
        "differences": [asdict(difference) for difference in comparison.differences],
        "unpromised": [asdict(difference) for difference in comparison.unpromised],
        "skipped": comparison.skipped,
        "ended_by_time": comparison.timed,
        "rules": asdict(comparison.rules),
        "before": comparison.before.rows() if comparison.before is not None else None,
        "after": comparison.after.rows() if comparison.after is not None else None,
        "schedule": asdict(comparison.schedule) if comparison.schedule is not None else None,
    }


def as_text(comparison: Comparison) -> str:
    """Return the report for a person: the verdict last, where it is seen."""
    lines: list[str] = []
    for difference in comparison.differences[:MAX_SHOWN]:
        lines += described(difference)
    if (more := len(comparison.differences) - MAX_SHOWN) > 0:
        lines.append(f"… and {more} more differences (--json lists them all).")
    lines += _latencies(comparison)
    lines += schedule.as_rows(comparison.schedule) if comparison.schedule is not None else []
    for reason, number in Counter(comparison.skipped.values()).items():
        lines.append(f"Not compared: {number} {comparison.unit}, for {reason}.")
    if comparison.timed:
        number = len(comparison.timed)
        lines.append(f"Ended by time or load, compared as far as both go: {number} requests.")
    lines += _unpromised(comparison)
    if not comparison.rules.text:
        lines.append("Text was redacted, so token ids were compared and text was not.")
    return "\n".join([*lines, _verdict(comparison)])


def _unpromised(comparison: Comparison) -> list[str]:
    """Say what two engines do differently: the first one whole, the rest as numbers."""
    if comparison.rules.is_same_engine:
        return []
    others = {difference.request_id for difference in comparison.unpromised}
    number = comparison.num_compared - len(others)
    lines = described(comparison.unpromised[0]) if comparison.unpromised else []
    return [
        *lines,
        f"Two engines, which do not promise each other's tokens: they agree in {number} of {comparison.num_compared} "
        f"{comparison.unit}. Ends, errors, prompts and the number of choices are judged all the same.",
    ]


def _verdict(comparison: Comparison) -> str:
    if not comparison.is_usable:
        return "Nothing could be compared."
    what = f"{comparison.num_compared} {comparison.unit} with {comparison.num_tokens} tokens"
    if not comparison.differences:
        return f"EQUAL{' where it is promised' if comparison.unpromised else ''}: {what}."
    requests = {difference.request_id for difference in comparison.differences} - {""}
    return f"DIFFERENT: {len(comparison.differences)} differences in {len(requests)} of {what}."


def described(difference: Difference) -> list[str]:
    """Return a difference in three lines: where, what was expected, what was found."""
    choice = f", choice {difference.choice}" if difference.choice is not None else ""
    place = ""
    if difference.position is not None:
        unit = UNITS.get(difference.what.partition(" of ")[0], "token")
        place = f", first different at {unit} {difference.position}"
    heading = f"{difference.request_id or 'all requests'}{choice}: {difference.what}{place}"
    return [heading, f"    expected {difference.expected!r}", f"    found    {difference.found!r}"]


def _latencies(comparison: Comparison) -> list[str]:
    before, after = comparison.before, comparison.after
    if before is None or after is None or not before.num_requests or not after.num_requests:
        return []
    tolerance = comparison.rules.latency
    rule = "not judged" if tolerance is None else f"at most {tolerance:.0%} worse is right"
    ours, others = before.rows(), after.rows()
    lines = [f"{'':24}{'expected':>12}{'found':>12}   ({rule})"]
    for name in ours:
        if name in others:
            change = f"{others[name] / ours[name] - 1:+9.0%}" if ours[name] else ""
            lines.append(f"{name:24}{ours[name]:12.4f}{others[name]:12.4f}{change}")
    return lines
