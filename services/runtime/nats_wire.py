"""How NATS's messages, configurations and error codes read in the transport's vocabulary. Pure translation."""

from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg
from nats.js import api

from schemas.errors import Conflict, NatterjackError, QueueFull, Unavailable
from services.runtime.transport import AckKind, NoStream, RawDelivery, RawMessage, StoredMessage, StreamSpec

WRONG_LAST_SEQUENCE = 10071
LIMIT_CODES = frozenset({10023, 10047, 10054, 10077, 10122, 10195})
"""JetStream error codes that mean "no room": resources, storage, message, byte and stream limits."""
NO_RESPONDERS = "503"
END_OF_BATCH = "204"
NO_MESSAGES = "404"
REQUEST_TIMEOUT = "408"

ACK_BODIES: dict[AckKind, bytes] = {
    "ack": b"+ACK",
    "progress": b"+WPI",
    "retry": b"-NAK",
    "terminate": b"+TERM",
}


def to_raw(message: Msg) -> RawMessage:
    """Return a core message."""
    return RawMessage(message.subject, message.headers or {}, message.data or b"", message.reply or None)


def to_stored(message: RawMessage) -> StoredMessage:
    """Return a message of a stream, as a direct get answers it."""
    headers = message.headers
    return StoredMessage(headers["Nats-Subject"], headers, message.body, int(headers["Nats-Sequence"]))


def to_delivery(message: Msg) -> RawDelivery:
    """Return a message that a consumer handed out."""
    return RawDelivery(
        message.subject, message.headers or {}, message.data, message.metadata.num_delivered, message.reply
    )


def stream_config(spec: StreamSpec) -> api.StreamConfig:
    """Return the stream's configuration as the server wants it."""
    return api.StreamConfig(
        name=spec.name,
        subjects=list(spec.subjects),
        retention=api.RetentionPolicy.WORK_QUEUE if spec.work_queue else api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW if spec.work_queue else api.DiscardPolicy.OLD,
        max_age=spec.max_age_s,
        max_bytes=spec.max_bytes or -1,
        max_msgs=spec.max_msgs or -1,
        max_msgs_per_subject=spec.max_msgs_per_subject or -1,
        storage=api.StorageType.MEMORY if spec.in_memory else api.StorageType.FILE,
        allow_direct=True,
        allow_msg_ttl=spec.message_ttl,
        duplicate_window=min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s),
        republish=api.RePublish(*spec.republish) if spec.republish else None,
    )


def read_error(stream: str, headers: Mapping[str, str]) -> Unavailable:
    """Return the error that a direct get answered by its status headers."""
    if headers.get("Status") == NO_RESPONDERS:
        return NoStream(f"The stream {stream} does not exist.")
    return Unavailable(f"Cannot read {stream}: {headers.get('Description', headers.get('Status'))}.")


def append_error(error: dict[str, Any], subject: str) -> NatterjackError:
    """Return the error that a publish acknowledgement holds."""
    code, description = error.get("err_code"), str(error.get("description", "unknown error"))
    if code == WRONG_LAST_SEQUENCE:
        return Conflict(f"Another message was stored on {subject} first: {description}.")
    if code in LIMIT_CODES:
        return QueueFull(f"The bus has no room for more: {description}.")
    return Unavailable(f"The bus refused to store a message on {subject}: {description}.")


def stream_error(error: Exception, stream: str) -> NatterjackError:
    """Return what the client raised as one of ours."""
    code = getattr(error, "err_code", None)
    text = getattr(error, "description", None) or type(error).__name__
    if code in LIMIT_CODES:
        return QueueFull(f"The stream {stream} cannot be created or has no room: {text}.")
    return Unavailable(f"The stream {stream} is not usable: {text}.")
