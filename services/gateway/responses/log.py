"""What the Responses endpoints need of the durable log, and an answer read from it as from a pipeline. Knows no bus."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from schemas.generation import Accepted, GenerateRequest
from schemas.output import OutputChunk
from schemas.responses import StoredResponse
from services.gateway.pipeline import Generations
from services.gateway.responses.writing import ResponseFold, ResponseForm


class ResponseLog(Protocol):
    """Records of responses, and the output log; any gateway finds the same there."""

    async def submit(self, request: GenerateRequest) -> Accepted:
        """Have a request accepted that goes on without a reader; raises coded errors."""

    async def remember(self, record: StoredResponse) -> None:
        """Store a record; that of an earlier request with the same id stays."""

    async def recall(self, request_id: str) -> StoredResponse | None:
        """Return a record, unless it was deleted or has expired."""

    async def forget(self, record: StoredResponse) -> None:
        """Delete a record."""

    async def chunks(self, request_id: str) -> Sequence[OutputChunk]:
        """Return the output as far as it has come."""

    def follow(self, request_id: str) -> AbstractAsyncContextManager[AsyncIterator[OutputChunk]]:
        """Yield the output from its beginning to its end, as it comes; leaving does not cancel it."""

    async def cancel(self, request_id: str) -> None:
        """Ask for an end, and wait a moment for it."""


def accepted_of(record: StoredResponse) -> Accepted:
    """Return how the request of a record was accepted."""
    return Accepted(
        request_id=record.request_id,
        model=record.model,
        num_prompt_tokens=record.num_prompt_tokens,
        created_s=record.created_s,
    )


@contextlib.asynccontextmanager
async def remembered(
    log: ResponseLog, form: ResponseForm, source: AbstractAsyncContextManager[Generations]
) -> AsyncIterator[Generations]:
    """Store the record of a response once it is accepted, before anything of it is answered."""
    async with source as generations:
        await log.remember(form.record(generations.accepted[0]))
        yield generations


@contextlib.asynccontextmanager
async def followed(log: ResponseLog, record: StoredResponse) -> AsyncIterator[Generations]:
    """Yield a response's output from its beginning, whoever asked for it."""
    async with log.follow(record.request_id) as chunks:
        yield Generations((accepted_of(record),), _numbered(chunks))


async def _numbered(chunks: AsyncIterator[OutputChunk]) -> AsyncIterator[tuple[int, OutputChunk]]:
    async for chunk in chunks:
        yield 0, chunk


def folded(record: StoredResponse, chunks: Sequence[OutputChunk]) -> ResponseFold | None:
    """Return the response as far as it has come, or None when the log has dropped its beginning."""
    if any(delta.start for chunk in chunks[:1] for delta in chunk.choices):
        return None
    fold = ResponseFold(record)
    for chunk in chunks:
        fold.take(chunk)
    return fold
