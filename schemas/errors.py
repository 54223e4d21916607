"""Every error that one service may tell another or a client: one closed tree.

    NatterjackError              code                         HTTP  retryable
    ├── InvalidRequest           invalid_request               400
    │   ├── MalformedMessage     malformed_message             400
    │   ├── InvalidParameter     invalid_parameter             400
    │   ├── UnsupportedParameter unsupported_parameter         400
    │   ├── ContextLengthExceeded context_length_exceeded      400
    │   └── SchemaVersionUnsupported schema_version_unsupported 400
    ├── Unauthenticated          invalid_api_key               401
    ├── ModelNotFound            model_not_found               404
    ├── OutputNotFound           output_not_found              404
    ├── PayloadTooLarge          payload_too_large             413
    ├── Cancelled                cancelled                     499
    ├── QueueFull                queue_full                    503   yes
    ├── Unavailable              service_unavailable           503   yes
    ├── DeadlineExceeded         deadline_exceeded             504
    ├── StaleEpoch               stale_epoch                   409        (between services only)
    ├── PoolUnknown              pool_unknown                  409   yes  (between services only)
    ├── Conflict                 conflict                      409        (a compare-and-set lost)
    └── InternalError            internal_error                500

Each carries a message for a person: what happened and what to do. On HTTP an error is `{"error": {message, type, param,
code}}`; on NATS the same object, with `Nats-Service-Error` and `Nats-Service-Error-Code` headers.
"""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue

ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"


class ErrorBody(BaseModel):
    """An error as it travels; `details` holds machine-readable facts, such as both lengths of an over-long prompt."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    message: str
    type: str
    param: str | None = None
    code: str
    details: dict[str, JsonValue] = {}


class ErrorReply(BaseModel):
    """`{"error": …}`: the body of an error reply on NATS and on HTTP."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    error: ErrorBody


class NatterjackError(Exception):
    """Base of the tree; raise a leaf."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, **details: JsonValue) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details

    def body(self) -> ErrorBody:
        """Return what travels."""
        return ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code, details=self.details)


class InvalidRequest(NatterjackError):
    """The request is wrong; sending it again will not help."""

    code, http_status, type = "invalid_request", 400, "invalid_request_error"


class MalformedMessage(InvalidRequest):
    """Not JSON, or not an object of the right shape."""

    code = "malformed_message"


class InvalidParameter(InvalidRequest):
    """One field, named in `param`, has a wrong value."""

    code = "invalid_parameter"


class UnsupportedParameter(InvalidRequest):
    """One field, named in `param`, asks for something that this deployment cannot do."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt (and the tokens asked for) exceed the model's context."""

    code = "context_length_exceeded"


class SchemaVersionUnsupported(InvalidRequest):
    """A message of another kind or another major version."""

    code = "schema_version_unsupported"


class Unauthenticated(NatterjackError):
    """No API key, or one that is not valid here."""

    code, http_status, type = "invalid_api_key", 401, "authentication_error"


class ModelNotFound(NatterjackError):
    """No model of that name is served."""

    code, http_status, type = "model_not_found", 404, "not_found_error"


class OutputNotFound(NatterjackError):
    """There is no stored output of that request, or not any more."""

    code, http_status, type = "output_not_found", 404, "not_found_error"


class PayloadTooLarge(NatterjackError):
    """Body and headers exceed what the bus or the gateway takes."""

    code, http_status, type = "payload_too_large", 413, "invalid_request_error"


class Cancelled(NatterjackError):
    """The client, or an operator, cancelled the request."""

    code, http_status, type = "cancelled", 499, "cancelled_error"


class QueueFull(NatterjackError):
    """The work queue is at its limit; try again later."""

    code, http_status, retryable, type = "queue_full", 503, True, "overloaded_error"


class Unavailable(NatterjackError):
    """A service of the path, or the bus, does not answer."""

    code, http_status, retryable, type = "service_unavailable", 503, True, "unavailable_error"


class DeadlineExceeded(NatterjackError):
    """The request's deadline passed before it was finished."""

    code, http_status, type = "deadline_exceeded", 504, "timeout_error"


class StaleEpoch(NatterjackError):
    """A message from an owner that has been replaced."""

    code, http_status = "stale_epoch", 409


class PoolUnknown(NatterjackError):
    """The cache manager does not know this executor's pool in this epoch: open it again with the leases held."""

    code, http_status, retryable = "pool_unknown", 409, True


class Conflict(NatterjackError):
    """A compare-and-set found another revision than the expected one."""

    code, http_status = "conflict", 409


class InternalError(NatterjackError):
    """A bug of ours; the log has the cause under the request id."""


BY_CODE: dict[str, type[NatterjackError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        MalformedMessage,
        InvalidParameter,
        UnsupportedParameter,
        ContextLengthExceeded,
        SchemaVersionUnsupported,
        Unauthenticated,
        ModelNotFound,
        OutputNotFound,
        PayloadTooLarge,
        Cancelled,
        QueueFull,
        Unavailable,
        DeadlineExceeded,
        StaleEpoch,
        PoolUnknown,
        Conflict,
        InternalError,
    )
}


def from_body(body: ErrorBody) -> NatterjackError:
    """Return the exception that `body` describes; a code from a newer version becomes an InternalError."""
    kind = BY_CODE.get(body.code, InternalError)
    error = kind(body.message, param=body.param)
    error.details = dict(body.details)  # not as keywords: a newer version may call one "message"
    return error
