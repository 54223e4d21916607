"""Takes text, or text and token ids, out of a message's JSON before it is written. Pure.

A string stays only where its key is known to hold no user's text; everything else, also what a newer version adds, is
replaced by its length, and unknown options of a request are dropped. So a new field is hidden until someone lists it.
"""

from functools import cache
from typing import Any

from schemas.codec import Part
from schemas.errors import ErrorBody, ErrorReply
from schemas.generation import ChatMessage, GenerateRequest
from services.recording.capture_file import Redaction
from services.recording.message_kinds import ERROR_SCHEMA, KINDS

OPERATIONAL = frozenset(
    {"cache_command", "cache_reply", "registration", "scheduler_lease", "effective_config", "accepted"}
    | {"handed_back", "pause", "cache_ownership"}
)
"""Messages without a user's text or tokens."""
PLAIN_STRINGS = frozenset(
    {
        "model", "request_id", "role", "type", "priority", "deliver", "tokenizer", "scheduler", "executor", "reply",
        "traceparent", "finish_reason", "event", "code", "param", "fault", "pooling",
        "kind", "instance", "command",
    }
)  # fmt: skip
TOKEN_IDS = frozenset(
    {"token_ids", "prompt_token_ids", "prompt", "token_id", "token", "top", "stop_token_ids", "end_token_ids"}
)
BYTES = "token_bytes"


def redact(schema: str | None, body: Any, redaction: Redaction) -> Any:
    """Return `body` without what `redaction` names: text (`text`), or text and token ids (`ids`)."""
    name = (schema or "").partition("/")[0]
    if redaction == "none" or name in OPERATIONAL:
        return body
    if name not in KINDS and name != ERROR_SCHEMA:
        return None
    if not isinstance(body, dict):
        return None
    if name == GenerateRequest.SCHEMA:
        body = _known_fields(body)
    return {key: _redact(key, value, redaction == "ids") for key, value in body.items()}


def _known_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Drop what the contract does not list: such an option may hold anything."""
    known = {key: value for key, value in body.items() if key in GenerateRequest.model_fields}
    messages = known.get("messages")
    if isinstance(messages, list):
        fields = ChatMessage.model_fields
        known["messages"] = [
            {key: value for key, value in message.items() if key in fields}
            for message in messages
            if isinstance(message, dict)
        ]
    return known


@cache
def _field_names() -> frozenset[str]:
    """Return the names of all fields of the contract: another key is somebody's own word."""
    names, kinds = set(ErrorReply.model_fields) | set(ErrorBody.model_fields), [Part]
    while kinds:
        kind = kinds.pop()
        names |= set(kind.model_fields)
        kinds += kind.__subclasses__()
    return frozenset(names)


def _redact(key: str, value: Any, hides_ids: bool) -> Any:
    if isinstance(value, str):
        return value if key in PLAIN_STRINGS else f"<{len(value)} characters>"
    if isinstance(value, dict):
        known = _field_names()
        return {name: _redact(name, item, hides_ids) for name, item in value.items() if name in known}
    if isinstance(value, list):
        if key == BYTES:
            return []
        return [_redact(key, item, hides_ids) for item in value]
    is_id = key in TOKEN_IDS and isinstance(value, int) and not isinstance(value, bool)
    return 0 if hides_ids and is_id else value
