"""Sends recorded requests again and collects what becomes of them, as any client would. An edge module."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import orjson

from schemas.codec import SCHEMA_HEADER, schema_of
from schemas.errors import InternalError, NatterjackError
from schemas.generation import Accepted, GenerateRequest
from services.recording.outcomes import Outcome
from services.recording.replay_plan import Reasked, due_s
from services.runtime.bus import Bus, decode_reply
from services.runtime.generation import Generation, generate

ACCEPT_TIMEOUT_S = 10.0


class Replay:
    """One replay against one deployment; `outcomes` are filed under the ids of the recording.

    `speed` None sends as fast as `max_concurrent` running requests allow. `limit_s` is what one request may take.
    """

    def __init__(self, bus: Bus, *, speed: float | None, max_concurrent: int, limit_s: float) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._bus = bus
        self._speed = speed
        self._limit_s = limit_s
        self._room = asyncio.Semaphore(max_concurrent) if speed is None else contextlib.nullcontext()

    async def run(self, requests: Sequence[Reasked], sending: Callable[[Reasked], None] = lambda asked: None) -> None:
        """Send everything and wait for every end; `sending` is told of each request just before it goes out."""
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for at_s, asked in due_s(requests, self._speed):
                tasks.create_task(self._ask(asked, started_s + at_s, sending))

    async def _ask(self, asked: Reasked, due_s: float, sending: Callable[[Reasked], None]) -> None:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        async with self._room:
            sending(asked)
            outcome = self.outcomes[asked.original] = Outcome(asked.request_id, asked=asked.body, asked_s=time.time())
            try:
                async with asyncio.timeout(self._limit_s):
                    if asked.request is None:
                        await self._ask_as_it_was(asked)
                    else:
                        await self._generate(asked, asked.request, outcome)
            except NatterjackError as error:
                outcome.refuse(error.body(), time.time())
            except TimeoutError:
                return  # an outcome without an end is a difference

    async def _ask_as_it_was(self, asked: Reasked) -> None:
        """Send a body that the contract does not allow; it must be refused."""
        subject, headers = self._bus.subjects.generate(asked.model), {SCHEMA_HEADER: schema_of(GenerateRequest)}
        body = asked.body.encode() if isinstance(asked.body, str) else orjson.dumps(asked.body)
        decode_reply(Accepted, await self._bus.transport.request(subject, body, headers, ACCEPT_TIMEOUT_S))
        raise InternalError("A request that is not allowed was accepted.")

    async def _generate(self, asked: Reasked, request: GenerateRequest, outcome: Outcome) -> None:
        cancelling: asyncio.Task[None] | None = None
        try:
            async with generate(self._bus, request, accept_timeout_s=ACCEPT_TIMEOUT_S) as generation:
                outcome.accepted = generation.accepted
                if asked.cancel_at == 0:
                    cancelling = asyncio.create_task(self._cancel_later(generation, asked.cancel_after_s))
                async for chunk in generation:
                    outcome.add_chunk(chunk, time.time())
                    if cancelling is None and asked.cancel_at is not None and outcome.num_tokens >= asked.cancel_at:
                        cancelling = asyncio.create_task(generation.cancel())
        finally:
            if cancelling is not None:
                cancelling.cancel()

    async def _cancel_later(self, generation: Generation, after_s: float) -> None:
        await asyncio.sleep(after_s / (self._speed or 1.0))
        await generation.cancel()
