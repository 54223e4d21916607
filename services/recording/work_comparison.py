"""Whether a tokenizer turned a request into the same work item: every field but those of the moment. Pure."""

from collections.abc import Iterable
from typing import Any

from schemas.generation import WorkItem
from services.recording.comparison import Difference, around, first_difference

OF_THE_MOMENT = frozenset(
    {"created_s", "deadline_s", "tokenizer", "output.created_s", "output.reply", "output.request_digest"}
)
"""When, where and for whom; the deadline counts from the creation. The digest is of the request, not of the work: it
changes with the options that a version knows."""
TRACE = "traceparent"
DEADLINE_TOLERANCE_S = 1e-3


def compare_work(expected: WorkItem, found: WorkItem) -> Iterable[Difference]:
    """Yield what differs, by the field's dotted name, with the first differing position where it is a list or text."""
    ours, others = _flat(expected), _flat(found)
    for name in ours:
        mine, theirs = ours[name], others[name]
        if mine == theirs:
            continue
        position = None
        if isinstance(mine, list | str) and isinstance(theirs, list | str):
            position = first_difference(mine, theirs, only_common=False)
            mine, theirs = around(mine, position or 0), around(theirs, position or 0)
        yield Difference(expected.request_id, f"work.{name}", mine, theirs, position=position)
    if not _is_same_wait(_wait_s(expected), _wait_s(found)):
        yield Difference(expected.request_id, "work.deadline", _wait_s(expected), _wait_s(found))


def _flat(work: WorkItem) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in work.model_dump(mode="json").items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        values.update(inner)
    return {name: value for name, value in values.items() if name not in OF_THE_MOMENT and not name.endswith(TRACE)}


def _wait_s(work: WorkItem) -> float | None:
    return None if work.deadline_s is None else work.deadline_s - work.created_s


def _is_same_wait(ours: float | None, other: float | None) -> bool:
    if ours is None or other is None:
        return ours is other
    return abs(ours - other) <= DEADLINE_TOLERANCE_S
