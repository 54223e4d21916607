"""The bodies of the OpenAI-compatible HTTP endpoints.

Requests name the fields whose meaning the gateway translates; every other field is kept and passed on under its own
name, so that `GenerateRequest` checks it and the tokenizer refuses what it cannot honour. Responses describe what the
gateway writes; `stop_reason`, `token_ids` and the `bytes` of a completion's logprobs are extensions.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from schemas.generation import MAX_TOP_LOGPROBS, ChatMessage
from schemas.sampling import PoolingKind
from schemas.tools import ToolCall

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of /v1/completions; null asks for as many as the context has room for."""

MAX_PROMPTS = 1024
"""Prompts in one /v1/completions request."""

MAX_INPUTS = 2048
"""Inputs in one /v1/embeddings request."""

NumTokens = Annotated[int, Field(ge=1)]
NumCompletionTokens = Annotated[int, Field(ge=0)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def _prompt_kind(prompt: Any) -> str:
    """The first element tells the four forms of a prompt apart; a wrong one is reported against the nearest form."""
    if not isinstance(prompt, (list, tuple)):
        return "str"
    first = prompt[0] if prompt else ""
    if isinstance(first, (list, tuple)):
        return "list[list[int]]"
    return "list[str]" if isinstance(first, str) else "list[int]"


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[tuple[str, ...], Field(max_length=MAX_PROMPTS), Tag("list[str]")]
    | Annotated[tuple[int, ...], Tag("list[int]")]
    | Annotated[tuple[tuple[int, ...], ...], Field(max_length=MAX_PROMPTS), Tag("list[list[int]]")],
    Discriminator(_prompt_kind),
]

Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[tuple[str, ...], Field(max_length=MAX_INPUTS), Tag("list[str]")]
    | Annotated[tuple[int, ...], Tag("list[int]")]
    | Annotated[tuple[tuple[int, ...], ...], Field(max_length=MAX_INPUTS), Tag("list[list[int]]")],
    Discriminator(_prompt_kind),
]


class _Body(BaseModel):
    """A frozen body; JSON's own types, no conversions."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream tells about usage: in a last chunk, and (`continuous_usage_stats`) in every chunk as well."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionRequest(_Body):
    """Body of POST /v1/completions: one prompt or several, as text or as token ids."""

    prompt: Prompt
    model: str | None = None
    max_tokens: NumCompletionTokens | None = DEFAULT_COMPLETION_TOKENS
    logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatCompletionRequest(_Body):
    """Body of POST /v1/chat/completions; `max_completion_tokens` goes before its older name `max_tokens`."""

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class EmbeddingRequest(_Body):
    """Body of POST /v1/embeddings: one input or several, as text or as token ids.

    `pooling` is an extension: the mean of all positions' hidden states, or the last one's. `dimensions` keeps that many
    values of the vector's beginning, and normalises them again.
    """

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: PoolingKind | None = None
    user: str | None = None


# ---- responses


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that were in the cache."""

    cached_tokens: int = 0


class CompletionUsage(BaseModel):
    """Token counts over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(BaseModel):
    """A token, its real bytes (a token may hold part of a character), and its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    """A generated token, and the likeliest tokens at its position."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token; `text_offset` counts characters of the joined `tokens`.

    With `echo` the prompt's tokens come first, the very first of them without a logprob.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    bytes: list[list[int]]


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class AssistantMessage(BaseModel):
    """The whole answer of one choice; `content` is null when it consists of tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class CalledFunctionChunk(BaseModel):
    """The name of a called function, at the call's beginning only, and more of its arguments."""

    name: str | None = None
    arguments: str = ""


class ToolCallChunk(BaseModel):
    """What a chunk adds to tool call number `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionChunk


class ChatDelta(BaseModel):
    """What a chunk adds to an answer; `role` in a choice's first chunk only."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChatChunkChoice(_Choice):
    """A chunk's part of one answer; `finish_reason` is set in its last chunk only."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(_Choice):
    """The text of one choice, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: CompletionUsage | None = None


class ChatCompletion(_Answer):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Answer):
    """One server-sent event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(_Answer):
    """Answer of POST /v1/completions, and each server-sent event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Embedding(BaseModel):
    """One input's vector: numbers, or little-endian float32 values in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(BaseModel):
    """A served model; `max_model_len` is its context length in tokens, once an executor has loaded it."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "natterjack"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
