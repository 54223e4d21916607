"""Turns what a client asks into a work item, or into the error that names what is wrong. Pure: time and ids are given.

Both doors pass here (HTTP through the gateway, NATS directly), so this is the one place that decides what is allowed.
"""

from dataclasses import dataclass

from pydantic import JsonValue

from schemas.errors import (
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    ModelNotFound,
    UnsupportedParameter,
)
from schemas.generation import (
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NEUTRAL_VALUES,
    UNSUPPORTED_PARAMETERS,
    GenerateRequest,
    OutputSpec,
    WorkItem,
)
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.embedding import check_embedding_options
from services.tokenizer.sampling_options import check_sampling, num_prompt_logprobs, resolve_sampling
from services.tokenizer.tool_format import tools_in_use
from services.tokenizer.vocabulary import Vocabulary

MAX_NAME_CHARS = 200
"""So much of a wrong model name is repeated: an error must fit into one message, whatever the request held."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What surrounds a request: its id, when it came, a seed for when it names none, and where replies go.

    `grammar` is the one that its output has to follow, checked; `request_digest` is of what was asked
    (see `services.tokenizer.repetition`).
    """

    request_id: str
    now_s: float
    random_seed: int
    tokenizer: str
    reply: str | None
    traceparent: str | None
    grammar: str = ""
    request_digest: str = ""


class Validator:
    """Validates and encodes for one model."""

    def __init__(self, model: str, vocabulary: Vocabulary, template: ChatTemplate | None) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._template = template

    def check(self, request: GenerateRequest) -> None:
        """Raise the coded error of the first thing that is wrong, before any text is encoded."""
        self.check_model(request.model)
        _check_supported(request.model_extra or {})
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Give either a prompt or messages.", param="prompt")
        if request.n > 1 and request.temperature == 0:
            raise InvalidParameter("n must be 1 when temperature is 0: every choice would be the same.", param="n")
        if request.max_tokens is not None and request.min_tokens > request.max_tokens:
            raise InvalidParameter("min_tokens must not exceed max_tokens.", param="min_tokens")
        check_embedding_options(request)
        tools_in_use(request)
        _check_prompt_wishes(request)
        _check_stops(_stops(request))
        self.check_ids(request.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS)
        check_sampling(request, self._vocabulary)

    def check_model(self, model: str | None) -> None:
        """Raise ModelNotFound for another model than ours."""
        if model not in (None, self._model):
            asked = (model or "")[:MAX_NAME_CHARS]
            raise ModelNotFound(f"The model {asked!r} is not served here; {self._model!r} is.", param="model")

    def check_ids(self, ids: tuple[int, ...], param: str, limit: int | None = None) -> None:
        """Raise InvalidParameter for what is no token, or for more than `limit` of them."""
        if limit is not None and len(ids) > limit:
            raise InvalidParameter(f"{param} has {len(ids)} entries; at most {limit} are allowed.", param=param)
        size = self._vocabulary.size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise InvalidParameter(f"{param} must be token ids from 0 to {size - 1}.", param=param)

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's tokens; takes time in proportion to the text, so run it off the event loop."""
        param = _prompt_field(request)
        if request.messages is not None:
            tokens = self._vocabulary.encode(self._render(request), add_special_tokens=False)
        elif isinstance(request.prompt, str):
            tokens = self._vocabulary.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        else:
            tokens = request.prompt or ()
            self.check_ids(tokens, "prompt")
        if not tokens:
            raise InvalidParameter(f"The {param} must have at least one token.", param=param)
        return tokens

    def _render(self, request: GenerateRequest) -> str:
        if not request.messages:
            raise InvalidParameter("messages must not be empty.", param="messages")
        if self._template is None:
            raise InvalidParameter(
                f"The model {self._model!r} has no chat template; send a prompt to /v1/completions instead, or "
                "configure one with tokenizer.chat_template_file.",
                param="messages",
            )
        asks_for_prompt = request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set
        if request.continue_final_message and asks_for_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        return self._template.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            tools=tools_in_use(request),
            variables=request.chat_template_kwargs,
        )

    def truncate(self, request: GenerateRequest, tokens: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
        """Return the end of the prompt that `truncate_prompt_tokens` asks to keep."""
        limit = request.truncate_prompt_tokens
        if limit is None:
            return tokens
        if limit == 0:
            raise InvalidParameter("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        room = max(max_model_len - max(request.max_tokens or 1, 1), 1)
        return tokens[-(room if limit < 0 else limit) :]

    def to_work(
        self, request: GenerateRequest, tokens: tuple[int, ...], arrival: Arrival, max_model_len: int
    ) -> WorkItem:
        """Return the work item; raises ContextLengthExceeded when prompt and answer do not fit."""
        param = _prompt_field(request)
        _check_prompt_logprobs(request, len(tokens))
        prompt_only = request.max_tokens == 0 or request.pooling is not None
        max_tokens = _fit(len(tokens), 1 if prompt_only else request.max_tokens, max_model_len, param)
        ends = self._vocabulary.end_token_ids
        stop_ids = request.stop_token_ids + (() if request.ignore_eos else ends)
        return WorkItem(
            request_id=arrival.request_id,
            model=self._model,
            priority=request.priority,
            cache_salt=request.cache_salt,
            skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache) or request.pooling == "mean",
            created_s=arrival.now_s,
            deadline_s=None if request.timeout_s is None else arrival.now_s + request.timeout_s,
            prompt_token_ids=tokens,
            max_tokens=max_tokens,
            n=request.n,
            sampling=resolve_sampling(request, self._vocabulary, arrival.random_seed, arrival.grammar),
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            end_token_ids=ends,
            tokenizer=arrival.tokenizer,
            output=OutputSpec(
                request_id=arrival.request_id,
                model=self._model,
                created_s=arrival.now_s,
                num_prompt_tokens=len(tokens),
                n=request.n,
                reply=arrival.reply if request.deliver == "reply" else None,
                stop=_stops(request),
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                num_logprobs=request.logprobs,
                reads_tool_calls=bool(tools_in_use(request)),
                min_tokens=request.min_tokens,
                echo=bool(request.echo),
                prompt_logprobs=num_prompt_logprobs(request) is not None,
                prompt_only=prompt_only,
                prompt_token_ids=tokens if request.echo or request.prompt_logprobs is not None else (),
                traceparent=arrival.traceparent,
                request_digest=arrival.request_digest,
            ),
        )


def _check_supported(extra: dict[str, JsonValue]) -> None:
    for name in sorted(extra.keys() & UNSUPPORTED_PARAMETERS):
        value = extra[name]
        if value is not None and (name not in NEUTRAL_VALUES or value != NEUTRAL_VALUES[name]):
            raise UnsupportedParameter(f"This version cannot honour {name!r}; leave it out.", param=name)


def _check_prompt_wishes(request: GenerateRequest) -> None:
    if request.echo and request.messages is not None:
        raise InvalidParameter("echo is only for a prompt, not for messages.", param="echo")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise InvalidParameter("max_tokens must be at least 1, unless the prompt is echoed.", param="max_tokens")


def _check_prompt_logprobs(request: GenerateRequest, num_prompt_tokens: int) -> None:
    num_logprobs = num_prompt_logprobs(request)
    if num_logprobs is not None and num_prompt_tokens * (1 + num_logprobs) > MAX_PROMPT_LOGPROBS:
        raise InvalidParameter(
            f"{1 + num_logprobs} logprobs for each of {num_prompt_tokens} prompt tokens are too many; at most "
            f"{MAX_PROMPT_LOGPROBS} in all are possible.",
            param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )


def _prompt_field(request: GenerateRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def _stops(request: GenerateRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else request.stop or ()


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameter(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
    if any(not stop or len(stop) > MAX_STOP_STRING_CHARS for stop in stops):
        raise InvalidParameter(f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters.", param="stop")


def _fit(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> int:
    """Return how many tokens may be generated; without a wish, as many as the context has room for."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{num_prompt_tokens} input tokens.",
            param=param,
            max_model_len=max_model_len,
            num_prompt_tokens=num_prompt_tokens,
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you asked for {max_tokens} "
            f"tokens after a prompt of {num_prompt_tokens} input tokens; at most {room} are possible.",
            param="max_tokens",
            max_model_len=max_model_len,
            num_prompt_tokens=num_prompt_tokens,
        )
    return max_tokens if max_tokens is not None else room
