"""What the HTTP side needs from the pipeline behind it, and several prompts read as one stream. Knows no bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from schemas.generation import Accepted, GenerateRequest
from schemas.openai import Model
from schemas.output import OutputChunk
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

MAX_ACCEPTING = 16
"""Prompts of one HTTP request that wait for acceptance at a time: bounds what a list of big prompts holds in memory."""
CANCEL_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted prompt, and its chunks; the last is final."""

    accepted: Accepted
    chunks: AsyncIterator[OutputChunk]


class Pipeline(Protocol):
    """The rest of the deployment."""

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[Generation]:
        """Yield the generation once the request is accepted; raises coded errors. Leaving early cancels it."""

    async def usable_id(self, base: str) -> str:
        """Return the id, made from `base`, whose output is not a failure: it may exist, and is then read again."""

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Return a prompt's tokens; raises coded errors."""

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Return the text of tokens; raises coded errors."""

    def models(self) -> Sequence[Model]:
        """Return the models that this deployment is for, whether or not they can answer just now."""

    def missing_roles(self) -> Sequence[str]:
        """Return the services of the path that have no healthy instance."""


@dataclass(frozen=True, slots=True)
class Generations:
    """All prompts of one HTTP request, accepted; the chunks come with the number of their prompt."""

    accepted: tuple[Accepted, ...]
    chunks: AsyncIterator[tuple[int, OutputChunk]]


@contextlib.asynccontextmanager
async def generate_all(pipeline: Pipeline, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generations]:
    """Yield once every request is accepted; raises the first error. Leaving cancels whatever has not ended."""
    if len(requests) == 1:
        async with pipeline.generate(requests[0]) as generation:
            yield Generations((generation.accepted,), _numbered(generation.chunks))
        return
    merge = _Merge(len(requests))
    gate = asyncio.Semaphore(MAX_ACCEPTING)
    tasks = [
        asyncio.create_task(merge.pump(number, pipeline, request, gate)) for number, request in enumerate(requests)
    ]
    try:
        accepted = await merge.all_accepted()
        yield Generations(accepted, merge.chunks())
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: one cancellation may be lost (see Client.check)."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


async def _numbered(chunks: AsyncIterator[OutputChunk]) -> AsyncIterator[tuple[int, OutputChunk]]:
    async for chunk in chunks:
        yield 0, chunk


class _Merge:
    """Several generations, each read by a task of its own into one bounded queue."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._accepted: asyncio.Queue[tuple[int, Accepted | Exception]] = asyncio.Queue()
        self._chunks: asyncio.Queue[tuple[int, OutputChunk | Exception]] = asyncio.Queue(num_requests)

    async def pump(self, number: int, pipeline: Pipeline, request: GenerateRequest, gate: asyncio.Semaphore) -> None:
        """Run one request to its end, or to the error that the reading task will raise."""
        errors: asyncio.Queue[tuple[int, Accepted | Exception]] | asyncio.Queue[tuple[int, OutputChunk | Exception]]
        errors = self._accepted
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with gate:
                    generation = await stack.enter_async_context(pipeline.generate(request))
                self._accepted.put_nowait((number, generation.accepted))
                errors = self._chunks
                async for chunk in generation.chunks:
                    await self._chunks.put((number, chunk))
        except Exception as error:  # carried over to the reading task, which raises it
            await errors.put((number, error))

    async def all_accepted(self) -> tuple[Accepted, ...]:
        """Return every prompt's acceptance, in the prompts' order."""
        accepted: dict[int, Accepted] = {}
        while len(accepted) < self._num_requests:
            number, item = await self._accepted.get()
            if isinstance(item, Exception):
                raise item
            accepted[number] = item
        return tuple(accepted[number] for number in range(self._num_requests))

    async def chunks(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        """Yield chunks as they come until every prompt has had its final one."""
        num_open = self._num_requests
        while num_open:
            number, item = await self._chunks.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.final
            yield number, item
