"""Errors as Anthropic's clients read them: their types, and the status they expect of an overloaded server. Pure."""

from typing import Any

from schemas.errors import ErrorBody, QueueFull

PATH_PREFIX = "/v1/messages"
REQUEST_ID_HEADER = "request-id"
"""Where Anthropic's clients look for the id, besides the body."""
OVERLOADED_STATUS = 529
"""Anthropic's own; its clients try again after it, as after every status from 500 on."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
"""Error types by status; other statuses below 500 are an `invalid_request_error`, others above an `api_error`."""


def is_served(path: str) -> bool:
    """Tell whether the errors of a path are Anthropic's."""
    return path == PATH_PREFIX or path.startswith(f"{PATH_PREFIX}/")


def anthropic_status(error: ErrorBody, status: int) -> int:
    """Return the status of an error that has `status` on the other endpoints."""
    return OVERLOADED_STATUS if error.code == QueueFull.code else status


def anthropic_error(error: ErrorBody, status: int, request_id: str) -> dict[str, Any]:
    """Return `{"type": "error", "error": {type, message, details}, "request_id"}`; `details` has our code and field."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {**error.details, "error_code": error.code, "param": error.param}
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, "details": details},
        "request_id": request_id,
    }
