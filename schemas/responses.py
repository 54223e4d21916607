"""The bodies of the OpenAI-compatible /v1/responses endpoints, and the record by which a response is found again.

A request names the fields whose meaning the gateway translates; every other field is kept, and is passed on as an
extension or refused. An item or part of a kind that is not listed is an `Other…`, which the gateway refuses by name.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from schemas.codec import Message
from schemas.generation import MAX_TOP_LOGPROBS

MAX_METADATA = 16
MAX_INPUT_ITEMS = 4096


class _Named(BaseModel):
    """A frozen part of a body; fields that are not listed have no meaning here."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class TextPart(_Named):
    """Text, of whichever side."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class OtherPart(_Named):
    """Content of a kind that no model here takes, such as an image."""

    type: str


_TEXT_KINDS = frozenset({"input_text", "output_text", "text"})


def _kind(value: Any) -> str | None:
    """The kind of a part or item, which may be missing; what is no text is no kind that we know."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind is None or isinstance(kind, str) else ""


InputPart = Annotated[
    Annotated[TextPart, Tag("part[text]")] | Annotated[OtherPart, Tag("part[other]")],
    Discriminator(lambda part: "part[text]" if _kind(part) in _TEXT_KINDS else "part[other]"),
]


def _text_or_list(value: Any) -> str:
    """A wrong value is reported against the nearest form: in a list, the entry that is wrong."""
    return "str" if isinstance(value, str) else "list[]"


Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[tuple[InputPart, ...], Tag("list[]")], Discriminator(_text_or_list)
]


class MessageItem(_Named):
    """One turn."""

    type: Literal["message"] | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_Named):
    """A call that the model made; `arguments` is JSON as text."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Named):
    """What a call returned."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: Content


class OtherItem(_Named):
    """An item of a kind that cannot be taken here."""

    type: str


def _item_tag(item: Any) -> str:
    kind = _kind(item)
    kind = "message" if kind is None else kind
    return f"item[{kind if kind in ('message', 'function_call', 'function_call_output') else 'other'}]"


Item = Annotated[
    Annotated[MessageItem, Tag("item[message]")]
    | Annotated[FunctionCallItem, Tag("item[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("item[function_call_output]")]
    | Annotated[OtherItem, Tag("item[other]")],
    Discriminator(_item_tag),
]


class ResponseTool(_Named):
    """A function that the model may call; tools of other types would run at OpenAI."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class TextConfig(_Named):
    """What the text must follow; `format` is `text`, `json_object`, or a `json_schema` with its `schema` beside it."""

    format: dict[str, JsonValue] | None = None
    verbosity: str | None = None


Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[tuple[Item, ...], Field(min_length=1, max_length=MAX_INPUT_ITEMS), Tag("list[]")],
    Discriminator(_text_or_list),
]


class AskedResponse(_Named):
    """What a response is asked with."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: tuple[ResponseTool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: tuple[str, ...] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    user: str | None = None


class ResponsesRequest(AskedResponse):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


class StoredResponse(Message):
    """What a response was asked with, kept as long as its output.

    `before` are the items of the conversation that its input goes on from. `deleted`: it is not to be found any more.
    """

    SCHEMA: ClassVar[str] = "stored_response"

    request_id: str
    model: str
    created_s: float
    num_prompt_tokens: int
    before: tuple[Item, ...] = ()
    body: AskedResponse
    deleted: bool = False


# ---- responses


class ResponseObject(BaseModel):
    """Answer of POST and GET /v1/responses, and what its streamed events tell at their beginning and end."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, JsonValue]]
    error: dict[str, JsonValue] | None
    incomplete_details: dict[str, JsonValue] | None
    usage: dict[str, JsonValue] | None


class InputItems(BaseModel):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: bool
