"""The one codec: a message becomes a JSON body and a `Nj-Schema` header, and back.

Unknown fields are ignored on receipt, so that an older service understands a newer one's additions. A change that an
older service must not misread raises the message's `MAJOR`, and then it is refused with a coded error. A message
without the header (a person with the `nats` command) is taken for the current version.
"""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import InvalidParameter, MalformedMessage, SchemaVersionUnsupported

SCHEMA_HEADER = "Nj-Schema"


class Part(BaseModel):
    """A frozen value inside messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, ser_json_bytes="base64")


class Message(Part):
    """A frozen value that travels alone; `SCHEMA` and `MAJOR` go into the header."""

    SCHEMA: ClassVar[str]
    MAJOR: ClassVar[int] = 1


M = TypeVar("M", bound=Message)


def schema_of(message: type[Message] | Message) -> str:
    """Return the header value, such as `step_plan/1`."""
    return f"{message.SCHEMA}/{message.MAJOR}"


def encode(message: Message) -> bytes:
    """Return the JSON body; the caller adds `schema_of(message)` as the header."""
    return message.model_dump_json(exclude_defaults=True).encode()


def decode(kind: type[M], headers: Mapping[str, str], body: bytes) -> M:
    """Return the message in `body`.

    Raises SchemaVersionUnsupported for another message or another major version, InvalidParameter (with the field as
    `param`) for a wrong value, MalformedMessage for what is not a JSON object.
    """
    check_schema(kind, headers.get(SCHEMA_HEADER))
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


def check_schema(kind: type[Message], header: str | None) -> None:
    """Raise SchemaVersionUnsupported unless `header` names this message in this major version, or nothing."""
    if header is None or header == schema_of(kind):
        return
    raise SchemaVersionUnsupported(
        f"This service understands {schema_of(kind)}, but the message says {header[:80]!r}. "
        "Upgrade the older side, or run both versions under two subject prefixes."
    )


def validation_error(error: ValidationError) -> MalformedMessage | InvalidParameter:
    """Translate pydantic's first complaint into a coded error that names the field and echoes no secret or body."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part))
    if first["type"] == "json_invalid" or not path:
        return MalformedMessage(f"The message is not valid: {first['msg']}.")
    return InvalidParameter(f"Invalid value for {path!r}: {first['msg']}.", param=path)


def _is_union_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union in the path (`prompt.str`, `prompt.tuple[int, ...]`): no field of ours."""
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part)
