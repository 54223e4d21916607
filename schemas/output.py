"""The way back: sampled tokens to the tokenizer, text to the output log, and what the scheduler hears of it."""

from typing import ClassVar, Literal

from schemas.codec import Message, Part
from schemas.errors import ErrorBody
from schemas.generation import OutputSpec
from schemas.step import FinishReason, TokenLogprob


class Usage(Part):
    """Token counts; `completion_tokens` over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class OpenOutput(Part):
    """Tells a tokenizer to write a request's output from now on.

    `epoch` is higher than that of any earlier writer. With `resume` the log may already hold output: read it, and go on
    where it ends; the tokens then come again from a number that the log surely reaches, and known ones are skipped.
    """

    spec: OutputSpec
    epoch: int
    resume: bool = False


class NewTokens(Part):
    """Tokens of one choice, from generated-token number `start` on, and its end if it ended.

    `stop_token`: the last token is the one that ended the choice; it is counted, but is no text. `prompt_logprobs` come
    with `start` 0 when they are asked for: of the prompt's tokens from the second on. `embedding` is the prompt's, as
    in `SampledToken`, and comes with the end of the choice.
    """

    request_id: str
    epoch: int
    index: int = 0
    start: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token: bool = False
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: str | None = None


class RequestFailed(Part):
    """The request as a whole ends with an error."""

    request_id: str
    epoch: int
    error: ErrorBody


class TokenBatch(Message):
    """One step's news for one tokenizer."""

    SCHEMA: ClassVar[str] = "token_batch"

    scheduler: str
    opened: tuple[OpenOutput, ...] = ()
    tokens: tuple[NewTokens, ...] = ()
    failed: tuple[RequestFailed, ...] = ()


class Feedback(Part):
    """What became of one request's output.

    stopped: choice `index` ended by a stop string after `num_tokens` generated tokens; generate no more of it.
    stored: the final chunk is in the log; the work item may be acknowledged.
    lost: this tokenizer does not know the request, or misses tokens from `num_tokens` on; open it again.
    fenced: the log has a writer of a higher epoch; let go of the request.
    """

    request_id: str
    epoch: int
    event: Literal["stopped", "stored", "lost", "fenced"]
    index: int = 0
    num_tokens: int = 0


class OutputFeedback(Message):
    """Feedback from one tokenizer to the scheduler that sent the tokens."""

    SCHEMA: ClassVar[str] = "output_feedback"

    tokenizer: str
    items: tuple[Feedback, ...]


class TokenText(Part):
    """One token as logprobs show it: its bytes, and the likeliest alternatives, each decoded alone.

    `logprob` is None for a prompt's first token, which nothing comes before.
    """

    token_id: int
    token: str
    token_bytes: tuple[int, ...]
    logprob: float | None
    top: tuple["TokenText", ...] = ()


class ToolCallDelta(Part):
    """What a chunk adds to the tool call number `index` of a choice; `id` and `name` come with its beginning only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ChoiceDelta(Part):
    """What one chunk adds to one choice: generated tokens from number `start` on, and their text.

    The text of a token may come later than the token (a character in pieces, a possible stop string). `stop_reason`:
    the stop string or the token id that ended the choice, None for the model's own end. `prompt` are the prompt's
    tokens, in the first chunks, when their logprobs are asked for. `embedding`: the prompt's, if that is what was asked
    for, as little-endian float32 values in base64.
    """

    index: int = 0
    start: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenText, ...] | None = None
    prompt: tuple[TokenText, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    embedding: str | None = None


class OutputChunk(Message):
    """One message of the output log; the last one has `final`, and `usage` or `error`.

    The log of a request is complete and in order; what it says is never contradicted. `epoch` names the writer,
    `request_digest` what was asked (see `schemas.generation.OutputSpec`).
    """

    SCHEMA: ClassVar[str] = "output_chunk"

    request_id: str
    model: str
    created_s: float
    epoch: int
    choices: tuple[ChoiceDelta, ...] = ()
    final: bool = False
    usage: Usage | None = None
    error: ErrorBody | None = None
    request_digest: str = ""
