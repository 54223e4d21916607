"""Which message a captured body is: from the schema header back to the class of `schemas`."""

from typing import TypeVar

import orjson

from schemas.cache import CacheCommand, CacheReply
from schemas.codec import SCHEMA_HEADER, Message, decode
from schemas.control import (
    CacheOwnership,
    Cancel,
    ControlReply,
    ControlRequest,
    DeadLetter,
    EffectiveConfig,
    HandedBack,
    Pause,
    Registration,
    SchedulerLease,
)
from schemas.errors import ErrorBody, ErrorReply, NatterjackError
from schemas.generation import Accepted, GenerateRequest, WorkItem
from schemas.output import OutputChunk, OutputFeedback, TokenBatch
from schemas.responses import StoredResponse
from schemas.step import StepPlan, StepResult
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.recording.capture_file import Captured

M = TypeVar("M", bound=Message)

ERROR_SCHEMA = "error"
"""What a coded error reply is called in a recording: on the bus it has no schema header."""

KINDS: dict[str, type[Message]] = {
    "generate_request": GenerateRequest,
    "accepted": Accepted,
    "tokenize_request": TokenizeRequest,
    "tokenize_reply": TokenizeReply,
    "detokenize_request": DetokenizeRequest,
    "detokenize_reply": DetokenizeReply,
    "work_item": WorkItem,
    "cache_command": CacheCommand,
    "cache_reply": CacheReply,
    "step_plan": StepPlan,
    "step_result": StepResult,
    "token_batch": TokenBatch,
    "output_feedback": OutputFeedback,
    "output_chunk": OutputChunk,
    "stored_response": StoredResponse,
    "dead_letter": DeadLetter,
    "cancel": Cancel,
    "control_request": ControlRequest,
    "control_reply": ControlReply,
    "registration": Registration,
    "scheduler_lease": SchedulerLease,
    "handed_back": HandedBack,
    "pause": Pause,
    "cache_ownership": CacheOwnership,
    "effective_config": EffectiveConfig,
}
"""What a recording holds, by schema."""

LEFT_OUT: dict[str, str] = {
    "keep_trace": "which traces are exported",
    "span_batch": "what an instance tells a console of its spans: more than everything else, and nothing new",
    "metric_sample": "what an instance tells a console of its metrics, every second",
    "trace_query": "what a person asks a console",
    "trace_reply": "what a console shows",
}
"""What a recorder hears and does not keep, with what it says: looking on is not part of a deployment's work."""


def kind_name(captured: Captured) -> str:
    """Return the schema's name without its version; empty when the sender named none."""
    return (captured.schema or "").partition("/")[0]


def message_of(captured: Captured, kind: type[M]) -> M | None:
    """Return the message when it is one of `kind` in a version that is understood, else None."""
    if kind_name(captured) not in ("", kind.SCHEMA):
        return None
    headers = {} if captured.schema is None else {SCHEMA_HEADER: captured.schema}
    try:
        return decode(kind, headers, orjson.dumps(captured.body))
    except NatterjackError:
        return None


def error_of(captured: Captured) -> ErrorBody | None:
    """Return the coded error that a reply holds."""
    if kind_name(captured) != ERROR_SCHEMA:
        return None
    try:
        return ErrorReply.model_validate(captured.body).error
    except ValueError:
        return None
