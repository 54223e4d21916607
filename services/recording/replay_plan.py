"""Turns recorded requests into requests to send again: new ids, the same seeds, the same cancellations. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError

from schemas.generation import GenerateRequest
from services.recording.capture_file import Redaction
from services.recording.outcomes import Outcome

SEED_RANGE = 2**64
TEXT_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens")
"""What says how text becomes tokens; it goes where the tokens are sent instead."""


class NotReplayable(Exception):
    """This request cannot be sent again; the message completes “for …”."""


@dataclass(frozen=True, slots=True)
class Reasked:
    """One request to send, `at_s` seconds after the first one.

    `request` is None for a body that the contract does not allow: it is sent as it was, to be refused again.
    `cancel_at` tokens are awaited before it is cancelled; where none had come, `cancel_after_s` seconds are.
    """

    original: str
    request_id: str
    at_s: float
    body: Any
    model: str
    request: GenerateRequest | None = None
    cancel_at: int | None = None
    cancel_after_s: float = 0.0


@dataclass(slots=True)
class ReplayPlan:
    """What to send, in order of time, and why the rest is not sent."""

    requests: list[Reasked] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def plan_replay(outcomes: Sequence[Outcome], redaction: Redaction, run_id: str, model: str | None = None) -> ReplayPlan:
    """Return the requests to send again; `run_id` makes their ids new, `model` asks another model than the recorded."""
    plan = ReplayPlan()
    start_s = min((o.asked_s for o in outcomes if o.asked_s is not None), default=0.0)
    for number, outcome in enumerate(outcomes, 1):
        try:
            plan.requests.append(_reask(outcome, redaction, f"replay-{run_id}-{number}", start_s, model))
        except NotReplayable as error:
            plan.skipped[outcome.request_id] = str(error)
    return plan


def _reask(outcome: Outcome, redaction: Redaction, request_id: str, start_s: float, model: str | None) -> Reasked:
    if outcome.asked_s is None:
        raise NotReplayable("the recording does not hold the request itself")
    if not outcome.is_final:
        raise NotReplayable("the recording does not hold its end")
    if redaction == "ids" or (redaction == "text" and outcome.work is None):
        raise NotReplayable("its content was redacted")
    served = model or _model_of(outcome)
    body = outcome.asked
    if isinstance(body, dict):
        body = {**body, "request_id": request_id, "deliver": "log"}
        if model is not None or outcome.work is not None:
            body["model"] = served
        body.update(seed_of(outcome))
        if redaction == "text":
            body = _with_ids(body, outcome)
    waited_s = outcome.cancelled_s - outcome.asked_s if outcome.cancelled_s is not None else 0.0
    return Reasked(
        original=outcome.request_id,
        request_id=request_id,
        at_s=outcome.asked_s - start_s,
        body=body,
        model=served,
        request=_validated(body),
        cancel_at=outcome.cancelled_at,
        cancel_after_s=waited_s,
    )


def _model_of(outcome: Outcome) -> str:
    if outcome.work is not None:
        return outcome.work.model
    named = outcome.asked.get("model") if isinstance(outcome.asked, dict) else None
    return named if isinstance(named, str) else outcome.subject.rpartition(".")[2]


def seed_of(outcome: Outcome) -> dict[str, int]:
    """Return the seed that was drawn for a request that named none; a request's is signed, a work item's not."""
    if outcome.work is None or outcome.asked.get("seed") is not None:
        return {}
    seed = outcome.work.sampling.seed
    return {"seed": seed - SEED_RANGE if seed >= SEED_RANGE // 2 else seed}


def _with_ids(body: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Ask with the tokens that the redacted text had become."""
    if body.get("stop"):
        raise NotReplayable("its stop strings were redacted")
    if outcome.work is None:
        raise NotReplayable("its content was redacted")
    kept = {key: value for key, value in body.items() if key not in TEXT_FIELDS}
    return {**kept, "prompt": list(outcome.work.prompt_token_ids)}


def _validated(body: Any) -> GenerateRequest | None:
    try:
        return GenerateRequest.model_validate_json(orjson.dumps(body))
    except ValidationError:
        return None


def due_s(requests: Iterable[Reasked], speed: float | None) -> list[tuple[float, Reasked]]:
    """Return when each request is due: the original spacing divided by `speed`; None: at once."""
    return [(0.0 if speed is None else request.at_s / speed, request) for request in requests]
