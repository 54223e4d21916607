"""An OpenAI request body becomes the requests that the pipeline understands. Pure: knows neither HTTP nor the bus.

A body with several prompts becomes several `GenerateRequest`s. Fields that the gateway does not translate are passed on
under their own names; `null` means "left out", as OpenAI's clients mean it.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from schemas.codec import validation_error
from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from schemas.openai import ChatCompletionRequest, CompletionRequest, StreamOptions

OWN_FIELDS = frozenset(
    {
        "prompt",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "return_token_ids",
        "pooling",
        "dimensions",
        "deliver",
        "resume",
        "is_new_id",
    }
)
"""Fields that are the gateway's business, or mean something else in a `GenerateRequest`."""

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is to be written."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """One HTTP request: what the pipeline is asked, prompt by prompt, and how the answer is written.

    `read` chunks of each prompt's output are known to the client already. All `requests` have the same number of
    choices. A single one has the id `id`, several have `<id>-0`, `<id>-1`, ….
    """

    id: str
    requests: tuple[GenerateRequest, ...]
    options: AnswerOptions
    read: tuple[int, ...] = ()


def parse_body(kind: type[B], body: bytes) -> B:
    """Return the request in `body`; raise MalformedMessage, or InvalidParameter that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


def translate_chat(body: ChatCompletionRequest, default_model: str, default_id: str) -> Translation:
    """Return the one request that a chat completion asks for; raise InvalidParameter.

    The defaults stand in for a body without `model` or `request_id`.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    fields = _passed_on(body, default_model, default_id)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    request = generate_request(fields)
    return Translation(_id_of(request), (request,), _options(body))


def translate_completion(body: CompletionRequest, default_model: str, default_id: str) -> Translation:
    """Return one request per prompt, in order; raise InvalidParameter."""
    prompts = _prompts(body.prompt)
    fields = _passed_on(body, default_model, default_id)
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
    first = generate_request({**fields, "prompt": prompts[0]})
    if len(prompts) == 1:
        return Translation(_id_of(first), (first,), _options(body))
    # Copies share everything but the prompt: a thousand prompts do not hold a thousand stop lists.
    requests = (
        first.model_copy(update={"prompt": prompt, "request_id": f"{_id_of(first)}-{number}"})
        for number, prompt in enumerate(prompts)
    )
    return Translation(_id_of(first), tuple(requests), _options(body))


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """The four forms of a prompt, as a tuple of texts or of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return (prompt,)
    if not prompt:
        raise InvalidParameter("'prompt' must not be empty.", param="prompt")
    return tuple(prompt)


def _passed_on(body: ChatCompletionRequest | CompletionRequest, default_model: str, default_id: str) -> dict[str, Any]:
    """The fields that keep their names, with the gateway's own values for what was left out."""
    fields = {name: value for name, value in body if value is not None and name not in OWN_FIELDS}
    return {"model": default_model, "request_id": default_id, **fields, "deliver": "log"}


def parse_fields(kind: type[B], fields: dict[str, Any]) -> B:
    """Validate as JSON: a strict schema takes a JSON array for a tuple, but no Python list."""
    return parse_body(kind, to_json(fields))


def generate_request(fields: dict[str, Any]) -> GenerateRequest:
    """Return the request with these fields; raise InvalidParameter."""
    request = parse_fields(GenerateRequest, fields)
    if request.n > 1 and request.temperature == 0:
        raise InvalidParameter("'n' must be 1 when 'temperature' is 0: all choices would be the same.", param="n")
    return request


def _id_of(request: GenerateRequest) -> str:
    return request.request_id or ""


def _options(body: ChatCompletionRequest | CompletionRequest) -> AnswerOptions:
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    if body.stream and (body.model_extra or {}).get("prompt_logprobs") is not None:
        raise InvalidParameter("'prompt_logprobs' is not available when 'stream' is true.", param="prompt_logprobs")
    asked = body.stream_options or StreamOptions()
    return AnswerOptions(
        stream=bool(body.stream),
        include_usage=bool(asked.include_usage),
        continuous_usage=bool(asked.include_usage and asked.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
    )
