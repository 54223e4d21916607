"""The client side of one request, as the gateway and the command line use it.

Listens to the request's live output before sending it, notices gaps by sequence number and fills them from the output
log, so that what comes out is complete and in order whatever died on the way. Leaving early cancels the request.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

from schemas.codec import decode
from schemas.control import Cancel
from schemas.errors import NatterjackError, Unavailable
from schemas.generation import Accepted, GenerateRequest
from schemas.output import OutputChunk
from services.runtime.bus import Bus
from services.runtime.transport import PREVIOUS_SEQUENCE_HEADER, SEQUENCE_HEADER, NoAnswer, NoResponders, RawMessage

log = logging.getLogger(__name__)

MAX_BUFFERED_CHUNKS = 256
"""A slow reader holds at most so many chunks here; what does not fit is read from the log when it is wanted."""
POLL_S = 2.0
"""After so much silence the log is asked whether a message was lost."""
ACCEPT_ATTEMPT_S = 3.0
"""Longer than a tokenizer waits for the bus to store the request, so that its own answer is heard."""
ACCEPT_PAUSE_S = 0.1
CANCEL_PERIOD_S = 0.5
CANCEL_ATTEMPTS = 20

_cancelling: set[asyncio.Task[None]] = set()


class Generation:
    """One accepted request; iterate over its chunks, the last of which is final."""

    def __init__(self, bus: Bus, request_id: str) -> None:
        self._bus = bus
        self.request_id = request_id
        self.accepted: Accepted | None = None
        self._arrived: asyncio.Queue[tuple[int, int, OutputChunk]] = asyncio.Queue(MAX_BUFFERED_CHUNKS)
        self._last = 0
        self._is_behind = False
        self.is_finished = False

    def receive(self, raw: RawMessage) -> None:
        """Take one live message; when the buffer is full it is dropped, and found in the log later."""
        try:
            chunk = decode(OutputChunk, raw.headers, raw.body)
            sequence, previous = int(raw.headers[SEQUENCE_HEADER]), int(raw.headers[PREVIOUS_SEQUENCE_HEADER])
        except (NatterjackError, KeyError, ValueError) as error:  # the last two: it is not from the log
            log.warning("unreadable output on %s: %s", raw.subject, error)
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._arrived.put_nowait((sequence, previous, chunk))

    def catch_up(self) -> None:
        """Begin with what is in the log already."""
        self._is_behind = True

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        while not self.is_finished:
            for sequence, chunk in await self._next():
                self._last = sequence
                self.is_finished = chunk.final
                yield chunk
                if chunk.final:
                    break

    async def _next(self) -> list[tuple[int, OutputChunk]]:
        """Return the chunks that follow the last one: from the live subject, or from the log after a gap or silence."""
        if self._is_behind:
            self._is_behind = False
            return await self._from_log()
        try:
            async with asyncio.timeout(POLL_S):
                sequence, previous, chunk = await self._arrived.get()
        except TimeoutError:
            return await self._from_log()
        if sequence <= self._last:
            return []
        if previous != self._last:
            return await self._from_log()
        return [(sequence, chunk)]

    async def _from_log(self) -> list[tuple[int, OutputChunk]]:
        subjects = self._bus.subjects
        try:
            stored = await self._bus.read(
                subjects.out_stream, subjects.out(self.request_id), OutputChunk, after=self._last
            )
        except Unavailable as error:  # the broker restarts: try again at the next silence
            log.warning("the output log of %s could not be read: %s", self.request_id, error.message)
            await asyncio.sleep(CANCEL_PERIOD_S)
            return []
        return [(entry.sequence, entry.message) for entry in stored]

    async def cancel(self) -> None:
        """Ask for an end until the final chunk is seen."""
        subjects = self._bus.subjects
        for _ in range(CANCEL_ATTEMPTS):
            with contextlib.suppress(NatterjackError):
                await self._bus.publish(subjects.cancel(self.request_id), Cancel(request_id=self.request_id))
                await asyncio.sleep(CANCEL_PERIOD_S)
                last = await self._bus.last(subjects.out_stream, subjects.out(self.request_id), OutputChunk)
                if last is not None and last.message.final:
                    return
        log.warning("request %s was cancelled, but no final chunk was seen", self.request_id)


@contextlib.asynccontextmanager
async def generate(
    bus: Bus,
    request: GenerateRequest,
    *,
    accept_timeout_s: float = 10.0,
    stays_wanted: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Generation]:
    """Send a request and yield its generation once it is accepted.

    Leaving before the end cancels it, unless it then `stays_wanted`. Raises the coded error that a tokenizer answered,
    NoResponders when none serves the model, NoAnswer when none did answer in time.
    """
    request_id = request.request_id or f"req-{uuid.uuid4().hex}"
    is_new_id = request.is_new_id or request.request_id is None
    request = request.model_copy(update={"request_id": request_id, "is_new_id": is_new_id, "deliver": "log"})
    generation = Generation(bus, request_id)
    subscription = await bus.transport.subscribe(bus.subjects.live(request_id), generation.receive)
    refused = False
    try:
        try:
            generation.accepted = await _accept(bus, request, accept_timeout_s)
        except NatterjackError as error:
            # a bus that did not answer may have stored it all the same
            refused = isinstance(error, NoResponders) or not isinstance(error, Unavailable)
            raise
        yield generation
    finally:
        await subscription.close()
        if not refused and not generation.is_finished and not stays_wanted():
            task = asyncio.get_running_loop().create_task(generation.cancel())
            _cancelling.add(task)
            task.add_done_callback(_cancelling.discard)


async def submit(bus: Bus, request: GenerateRequest, *, accept_timeout_s: float = 10.0) -> Accepted:
    """Send a request that goes on without a reader; its output is found in the log by its id. Raises as `generate`."""
    return await _accept(bus, request.model_copy(update={"deliver": "log"}), accept_timeout_s)


@contextlib.asynccontextmanager
async def follow(bus: Bus, request_id: str) -> AsyncIterator[Generation]:
    """Yield the output of a request that was accepted before, from its first chunk on; leaving does not cancel it."""
    generation = Generation(bus, request_id)
    subscription = await bus.transport.subscribe(bus.subjects.live(request_id), generation.receive)
    generation.catch_up()
    try:
        yield generation
    finally:
        await subscription.close()


async def _accept(bus: Bus, request: GenerateRequest, timeout_s: float) -> Accepted:
    """Ask until a tokenizer answers: one that died with the question is replaced, and its id makes repeating safe."""
    subject, deadline = bus.subjects.generate(request.model or ""), time.monotonic() + timeout_s
    unanswered: NoAnswer | None = None
    while True:
        remaining_s = deadline - time.monotonic()
        try:
            return await bus.request(
                subject, request, Accepted, timeout_s=min(ACCEPT_ATTEMPT_S, max(remaining_s, 0.01))
            )
        except (NoResponders, NoAnswer) as error:
            unanswered = error if isinstance(error, NoAnswer) else unanswered  # whoever got it may have stored it
            if remaining_s <= ACCEPT_PAUSE_S:
                raise unanswered or error from None
        await asyncio.sleep(ACCEPT_PAUSE_S)


async def finish_cancelling(timeout_s: float = 2.0) -> None:
    """Give cancellations that still run a moment, before the bus is closed."""
    if _cancelling:
        await asyncio.wait(set(_cancelling), timeout=timeout_s)
