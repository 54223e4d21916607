"""How one service's output compares with the recorded one: part by part, in words and as JSON. Pure."""

from collections.abc import Mapping
from typing import Any

from services.recording import report
from services.recording.comparison import Comparison


def as_json(stage: str, parts: Mapping[str, Comparison]) -> dict[str, Any]:
    """Return what `--json` prints; parts that the recording does not hold are neither equal nor different."""
    is_equal = not any(part.differences for part in parts.values())
    return {"stage": stage, "equal": is_equal, **{name: report.as_json(part) for name, part in parts.items()}}


def as_text(parts: Mapping[str, Comparison]) -> str:
    """Return the report for a terminal."""
    texts = [report.as_text(part) for part in parts.values() if part.is_usable]
    absent = [f"The recording holds no {name} to compare." for name, part in parts.items() if not part.is_usable]
    return "\n".join([*texts, *absent])
