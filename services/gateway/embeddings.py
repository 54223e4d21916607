"""POST /v1/embeddings: a body becomes one request per input, and their vectors one answer. Knows no bus."""

import base64
import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive

from schemas.codec import validation_error
from schemas.errors import InvalidParameter, NatterjackError, from_body
from schemas.generation import GenerateRequest
from schemas.openai import EmbeddingRequest
from schemas.output import OutputChunk, Usage
from services.gateway import spans
from services.gateway.connection import until_disconnect
from services.gateway.pipeline import Pipeline, generate_all

OWN_FIELDS = frozenset({"input", "encoding_format", "user", "deliver", "resume", "is_new_id", "prompt"})
"""Fields that are the gateway's business; the others are passed on under their own names."""
VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class AskedEmbeddings:
    """One HTTP request: what the pipeline is asked, input by input, and how vectors are written."""

    id: str
    requests: tuple[GenerateRequest, ...]
    encoding: Literal["float", "base64"]


def translate_embedding(body: EmbeddingRequest, default_model: str, default_id: str) -> AskedEmbeddings:
    """Return one request per input, in order; raise InvalidParameter. `null` means "left out"."""
    inputs = _inputs(body.input)
    passed_on = {name: value for name, value in body if value is not None and name not in OWN_FIELDS}
    fields = {"model": default_model, "request_id": default_id, "pooling": "mean", **passed_on, "deliver": "log"}
    with _named_as_in_the_body():
        first = _generate_request({**fields, "prompt": inputs[0]})
    request_id = first.request_id or ""
    others = (
        first.model_copy(update={"prompt": one, "request_id": f"{request_id}-{number}"})
        for number, one in enumerate(inputs)
    )
    requests = (first,) if len(inputs) == 1 else tuple(others)
    return AskedEmbeddings(request_id, requests, body.encoding_format or "float")


def _inputs(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """The four forms of an input, as a tuple of texts or of token ids."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return (given,)
    if not given:
        raise InvalidParameter("'input' must not be empty.", param="input")
    return tuple(given)


def _generate_request(fields: dict[str, Any]) -> GenerateRequest:
    """Validate as JSON: the strict schema takes a JSON array for a tuple, but no Python list."""
    try:
        return GenerateRequest.model_validate_json(to_json(fields))
    except ValidationError as error:
        raise validation_error(error) from None


async def embed(pipeline: Pipeline, asked: AskedEmbeddings, receive: Receive) -> Response:
    """Return the answer when every input has its vector; raises coded errors, ClientGone."""
    vectors: dict[int, str] = {}
    usages: dict[int, Usage] = {}
    with _named_as_in_the_body():
        async with until_disconnect(receive) as client, generate_all(pipeline, asked.requests) as generations:
            client.check()
            async for number, chunk in generations.chunks:
                client.check()
                for vector in _vectors_in(chunk):
                    vectors[number] = vector
                if chunk.usage is not None:
                    usages[number] = chunk.usage
    if len(vectors) != len(asked.requests):
        raise InvalidParameter(
            f"The request_id {asked.id!r} was used before, for a request without embeddings.", param="request_id"
        )
    spans.describe_usage(usages.values())
    num_tokens = sum(usage.prompt_tokens for usage in usages.values())
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": number, "embedding": _written(vectors[number], asked.encoding)}
            for number in sorted(vectors)
        ],
        "model": generations.accepted[0].model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return Response(to_json(answer), media_type="application/json")


def _vectors_in(chunk: OutputChunk) -> Iterator[str]:
    if chunk.error is not None:
        raise from_body(chunk.error)
    return (delta.embedding for delta in chunk.choices if delta.embedding is not None)


def _written(vector: str, encoding: Literal["float", "base64"]) -> str | list[float]:
    """As it travels, or as numbers of nine digits, from which the same float32 values are read."""
    if encoding == "base64":
        return vector
    raw = base64.b64decode(vector)
    return [float(f"{value:.9g}") for value in struct.unpack(f"<{len(raw) // VALUE_BYTES}f", raw)]


@contextlib.contextmanager
def _named_as_in_the_body() -> Iterator[None]:
    """What the pipeline calls the prompt is the input of this body."""
    try:
        yield
    except NatterjackError as error:
        if error.param is None or error.param.partition(".")[0] != "prompt":
            raise
        param = "input" + error.param.removeprefix("prompt")
        raise type(error)(error.message, param=param, **error.details) from None
