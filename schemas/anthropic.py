"""The bodies of the Anthropic-compatible HTTP endpoints: Messages and their token count.

Requests name the fields whose meaning the gateway translates; every other field is kept, and is passed on as an
extension or refused. A content block of a kind that is not listed is an `OtherBlock`, which the gateway refuses.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from schemas.generation import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from schemas.tools import TOOL_NAME_PATTERN


class _Body(BaseModel):
    """A frozen body; JSON's own types, no conversions."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


class _Named(BaseModel):
    """A frozen part of a body; fields that are not listed are hints, such as `cache_control`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class TextBlock(_Named):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(_Named):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class OtherBlock(_Named):
    """Content of a kind that no model here takes, such as an image."""

    type: str


def _tag(block: Any, known: frozenset[str]) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"block[{kind if isinstance(kind, str) and kind in known else 'other'}]"


_RESULT_KINDS = frozenset({"text"})
_KINDS = frozenset({"text", "tool_use", "tool_result"})

ResultBlock = Annotated[
    Annotated[TextBlock, Tag("block[text]")] | Annotated[OtherBlock, Tag("block[other]")],
    Discriminator(lambda block: _tag(block, _RESULT_KINDS)),
]


def _text_or_list(value: Any) -> str:
    """A wrong value is reported against the nearest form: in a list, the entry that is wrong."""
    return "str" if isinstance(value, str) else "list[]"


ResultContent = Annotated[
    Annotated[str, Tag("str")] | Annotated[tuple[ResultBlock, ...], Tag("list[]")], Discriminator(_text_or_list)
]


class ToolResultBlock(_Named):
    """What a call returned; comes in a user's turn."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("block[text]")]
    | Annotated[ToolUseBlock, Tag("block[tool_use]")]
    | Annotated[ToolResultBlock, Tag("block[tool_result]")]
    | Annotated[OtherBlock, Tag("block[other]")],
    Discriminator(lambda block: _tag(block, _KINDS)),
]


Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[tuple[ContentBlock, ...], Tag("list[]")], Discriminator(_text_or_list)
]


class MessageParam(_Named):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Content


class ToolParam(_Named):
    """A function that the model may call; `type` is `custom` or left out, others run at Anthropic."""

    name: Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class ToolChoice(_Named):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(_Named):
    """What the text must follow."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: Annotated[JsonValue, Field(alias="schema")] = None


class OutputConfig(_Named):
    """How the answer is to be: only its format can be chosen here."""

    format: OutputFormat | None = None
    effort: str | None = None


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class CountTokensRequest(_Body):
    """Body of POST /v1/messages/count_tokens: what an answer would be generated from."""

    messages: Annotated[tuple[MessageParam, ...], Field(min_length=1)]
    model: str | None = None
    system: ResultContent | None = None
    tools: tuple[ToolParam, ...] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[tuple[StopSequence, ...], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None


# ---- responses


class MessageUsage(BaseModel):
    """Token counts; `input_tokens` without those that were in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerText(BaseModel):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class AnswerToolUse(BaseModel):
    """A call in an answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class AnthropicMessage(BaseModel):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorBody(BaseModel):
    """What is wrong; `details` has our `error_code`, the field as `param`, and the error's facts."""

    type: str
    message: str
    details: dict[str, JsonValue]


class AnthropicError(BaseModel):
    """An error of these endpoints."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str
