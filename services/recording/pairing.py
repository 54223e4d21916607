"""Which request of one recording is which of another: by the replay's own notes, by id, or by what was asked. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from services.recording.capture_file import Note
from services.recording.outcomes import Outcome

REPLAYED = "replayed"
ANEW = frozenset({"request_id", "seed", "deliver"})
"""What a replay changes in a request."""


def replayed_ids(notes: Iterable[Note]) -> dict[str, str]:
    """Return the original id of each replayed one."""
    return {
        str(note.facts["request_id"]): str(note.facts["original"])
        for note in notes
        if note.kind == REPLAYED and "original" in note.facts and "request_id" in note.facts
    }


def pair(expected: Sequence[Outcome], found: Iterable[Outcome], originals: Mapping[str, str]) -> dict[str, Outcome]:
    """Return, under each expected request's id, its counterpart.

    Where neither notes nor ids name one, requests that ask the same are paired in their order.
    """
    paired: dict[str, Outcome] = {}
    rest: dict[bytes, list[Outcome]] = defaultdict(list)
    ids = {outcome.request_id for outcome in expected}
    for outcome in found:
        name = originals.get(outcome.request_id, outcome.request_id)
        if name in ids:
            paired[name] = outcome
        else:
            rest[_question(outcome.asked)].append(outcome)
    for outcome in expected:
        candidates = rest.get(_question(outcome.asked))
        if outcome.request_id not in paired and candidates:
            paired[outcome.request_id] = candidates.pop(0)
    return paired


def _question(asked: Any) -> bytes:
    if isinstance(asked, dict):
        asked = {key: value for key, value in asked.items() if key not in ANEW}
    return orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
