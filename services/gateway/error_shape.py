"""Errors as HTTP shows them: status, `Retry-After`, and the error object of the path's own clients. Pure."""

from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from schemas.errors import ErrorBody, NatterjackError
from services.gateway.messages.error_object import anthropic_error, anthropic_status, is_served

RETRY_AFTER_S = 1
"""Waiting clients come back soon: a queue slot frees within a fraction of a second, a restart takes a few."""

MESSAGES = {
    404: "There is nothing at this path. The endpoints are listed under /docs.",
    405: "This path does not take this method. The endpoints are listed under /docs.",
}

CODES = {
    404: "unknown_path",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
}

_REQUEST_ID = "natterjack.request_id"


def name_request(scope: Scope, request_id: str) -> None:
    """Note the id that this exchange's errors and log lines carry."""
    scope.setdefault("state", {})[_REQUEST_ID] = request_id


def request_id_of(scope: Scope) -> str:
    """Return the id that was noted, or nothing."""
    return str(scope.get("state", {}).get(_REQUEST_ID, ""))


def error_object(error: ErrorBody) -> dict[str, Any]:
    """Return `{"error": {message, type, param, code}}`, with `details` where there are any."""
    fields = error.model_dump(mode="json")
    if not error.details:
        del fields["details"]
    return {"error": fields}


def error_response(error: NatterjackError, scope: Scope) -> Response:
    """Return the response for a coded error."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retryable else None
    return _response(error.body(), error.http_status, headers, scope)


def protocol_error_response(error: HTTPException, scope: Scope) -> Response:
    """Return the response for what is wrong with the HTTP itself: path, method, media type."""
    message = MESSAGES.get(error.status_code, error.detail)
    code = CODES.get(error.status_code, "invalid_request")
    body = ErrorBody(message=message, type="invalid_request_error", code=code)
    return _response(body, error.status_code, dict(error.headers or {}), scope)


def _response(body: ErrorBody, status: int, headers: dict[str, str] | None, scope: Scope) -> Response:
    if is_served(scope["path"]):
        status = anthropic_status(body, status)
        content = anthropic_error(body, status, request_id_of(scope))
    else:
        content = error_object(body)
    return Response(to_json(content), status, headers, media_type="application/json")
