"""Errors in the words of the endpoint: a field has another name there than in the request that it became. Pure."""

import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from schemas.errors import NatterjackError
from schemas.generation import GenerateRequest

T = TypeVar("T")

NOT_IN_ONE_ANSWER = (
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "prompt",
)
"""Options of other endpoints that ask for something that an answer of one text and its tool calls has no place for."""
EXTENSIONS = frozenset(GenerateRequest.model_fields) - frozenset(
    {
        *NOT_IN_ONE_ANSWER,
        "messages",
        "deliver",
        "resume",
        "is_new_id",
        "stop",
        "response_format",
        "max_tokens",
        "pooling",
        "dimensions",
    }
)
"""Fields of a request that any endpoint may pass on under their own names."""


def renamed(error: NatterjackError, names: Mapping[str, str]) -> NatterjackError:
    """Return the error with the field, and its name in the message, as the endpoint calls it."""
    field, dot, rest = (error.param or "").partition(".")
    name = names.get(field)
    if name is None:
        return error
    error.param = name + dot + rest
    error.message = re.sub(rf"\b{re.escape(field)}\b", name, error.message)
    return error


@contextlib.contextmanager
def renamed_in(names: Mapping[str, str]) -> Iterator[None]:
    """Run the block; its errors come out renamed."""
    try:
        yield
    except NatterjackError as error:
        raise renamed(error, names) from None


@contextlib.asynccontextmanager
async def in_words_of(names: Mapping[str, str], source: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter `source`; errors of it, and of the block, come out renamed."""
    with renamed_in(names):
        async with source as entered:
            yield entered
