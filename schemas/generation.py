"""The request, before and after validation.

`GenerateRequest` is what a client asks, with OpenAI's and vLLM's names; `Accepted` answers it; `WorkItem` is the
validated request as it lies in the work queue: tokens instead of text, every default resolved.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue

from schemas.codec import Message, Part
from schemas.sampling import PoolingKind, SamplingParams
from schemas.tools import NamedTool, Tool, ToolCall

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 100_000
"""Logprobs of a whole prompt, alternatives included: they travel in one message."""
MAX_SEED = 2**63 - 1
REQUEST_ID_PATTERN = r"^[\x21-\x7e]+$"
"""Printable ASCII without spaces: an id goes into headers and log lines."""

UNSUPPORTED_PARAMETERS = frozenset(
    {
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "structural_tag",
        "functions",
        "function_call",
        "max_completion_tokens",
        "top_logprobs",
        "deadline",
        "length_penalty",
        "logits_processors",
        "prompt_embeds",
        "chat_template",
        "suffix",
        "best_of",
        "use_beam_search",
        "audio",
        "modalities",
        "prediction",
    }
)
"""Options that clients know and this version cannot honour: asking for one is an error, never silently ignored."""

NEUTRAL_VALUES: dict[str, JsonValue] = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1,
    "modalities": ["text"],
}
"""Values of unsupported options that ask for nothing, which many clients send."""


class TextPart(Part):
    """One part of a message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(Part):
    """One message of a conversation; `tool_calls` are an assistant's, `tool_call_id` tells what a tool answers."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None


class GenerateRequest(Message):
    """What a client asks: exactly one of `prompt` (text or token ids) and `messages`.

    `max_tokens` 0 is for those who want the prompt back, by `echo` or `prompt_logprobs`. `truncate_prompt_tokens` keeps
    that many tokens of the prompt's end, -1: as many as there is room for. Fields left out take the model's own
    defaults, then OpenAI's. With `skip_reading_prefix_cache` the whole prompt is computed, whatever is cached of it;
    what is computed may serve others. With `pooling` the prompt's embedding is wanted and no text; `dimensions` keeps
    the first values of it (see `schemas.sampling.Pooling`). Fields that are not listed are kept so that the tokenizer
    can refuse those it knows but cannot honour (`UNSUPPORTED_PARAMETERS`).

    `deliver`: where the output chunks go, besides the output log: to the reply subject of the request, or nowhere (a
    gateway reads the log's live subject). `resume`: only the stored output of this `request_id` is wanted; nothing is
    generated anew. `is_new_id`: the sender made the id up for this request, so that no older output can have it, and
    nobody looks for one.
    """

    SCHEMA: ClassVar[str] = "generate_request"
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=REQUEST_ID_PATTERN)] | None = None
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    response_format: dict[str, JsonValue] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    guided_json: JsonValue = None
    guided_regex: JsonValue = None
    guided_choice: JsonValue = None
    guided_grammar: JsonValue = None
    guided_json_object: JsonValue = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: Priority = "normal"
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    skip_reading_prefix_cache: bool | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    pooling: PoolingKind | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    resume: bool = False
    is_new_id: bool = False
    deliver: Literal["reply", "log"] = "reply"


class Accepted(Message):
    """The request is stored: it will end in exactly one final chunk, whatever dies."""

    SCHEMA: ClassVar[str] = "accepted"

    request_id: str
    model: str
    num_prompt_tokens: int
    created_s: float


class OutputSpec(Part):
    """What the text side needs to turn a request's tokens into its output; travels with the work and comes back.

    Stop strings count only in the text after the first `min_tokens` tokens. `prompt_token_ids` are there when the
    output says the prompt again, as text (`echo`) or with `prompt_logprobs`. `prompt_only`: nothing but the prompt is
    wanted; the one generated token only brings the end. `reads_tool_calls`: the text may hold calls, which are told
    apart from its content. `request_digest`: of what the client asked, to tell a repeated request from another one that
    uses its id; empty from a version that did not look.
    """

    request_id: str
    model: str
    created_s: float
    num_prompt_tokens: int
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    reply: str | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MAX_STOP_STRINGS)] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    reads_tool_calls: bool = False
    min_tokens: int = 0
    echo: bool = False
    prompt_logprobs: bool = False
    prompt_only: bool = False
    prompt_token_ids: tuple[int, ...] = ()
    traceparent: str | None = None
    request_digest: str = ""


class WorkItem(Message):
    """A validated request in the work queue.

    `seed` in `sampling` is choice 0's; choice i uses seed + i. `stop_token_ids` end a choice (the model's own end
    tokens included unless the request ignores them); `end_token_ids` cannot be sampled before `min_tokens`.
    `deadline_s` is Unix time. `tokenizer` is the instance that accepted the request and will most likely write its
    output.
    """

    SCHEMA: ClassVar[str] = "work_item"

    request_id: str
    model: str
    priority: Priority = "normal"
    created_s: float
    deadline_s: float | None = None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    tokenizer: str
    output: OutputSpec
