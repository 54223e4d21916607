"""The Responses endpoints' log on the bus. An edge module: the only one of theirs that knows the bus.

A response in the background has no client that waits, so that the gateway which took it in reads its output along, only
to measure it as it does the others.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from schemas.control import Cancel
from schemas.errors import Conflict, NatterjackError
from schemas.generation import Accepted, GenerateRequest
from schemas.output import OutputChunk
from schemas.responses import AskedResponse, StoredResponse
from services.runtime.bus import Bus
from services.runtime.generation import follow, submit
from services.runtime.request_meter import RequestMeter, RequestTimes
from services.runtime.telemetry import current_trace_id

log = logging.getLogger(__name__)

CANCEL_PERIOD_S = 0.5
CANCEL_POLL_S = 0.05
CANCEL_TIMEOUT_S = 5.0
MAX_MEASURED_S = 3600.0
"""Whatever takes longer is measured no more."""


class BusResponseLog:
    """Records in a stream of their own, with one message per response; output in the output log."""

    def __init__(self, bus: Bus, accept_timeout_s: float, meter: RequestMeter | None = None) -> None:
        self._bus = bus
        self._accept_timeout_s = accept_timeout_s
        self._meter = meter
        self._measuring: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerateRequest) -> Accepted:
        """Have a request accepted that goes on without a reader."""
        if self._meter is None:
            return await submit(self._bus, request, accept_timeout_s=self._accept_timeout_s)
        times = self._meter.begin(time.perf_counter(), current_trace_id())
        try:
            accepted = await submit(self._bus, request, accept_timeout_s=self._accept_timeout_s)
        except BaseException as error:
            if isinstance(error, NatterjackError):
                times.failed(error.code)
            times.leave()
            raise
        times.accepted(accepted.num_prompt_tokens)
        task = asyncio.create_task(self._measure(accepted.request_id, times), name="measure a background response")
        self._measuring.add(task)
        task.add_done_callback(lambda _: times.leave())  # also of one that was cancelled before it began
        task.add_done_callback(self._measuring.discard)
        return accepted

    async def _measure(self, request_id: str, times: RequestTimes) -> None:
        try:
            async with asyncio.timeout(MAX_MEASURED_S), self.follow(request_id) as chunks:
                async for chunk in chunks:
                    times.chunk(chunk, time.perf_counter())
        except (NatterjackError, TimeoutError) as error:
            log.warning("a background response is measured no more: %s", error, extra={"request_id": request_id})

    async def close(self) -> None:
        """Measure no more; the responses go on."""
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)

    async def remember(self, record: StoredResponse) -> None:
        """Store a record; that of an earlier request with the same id stays, deleted or not."""
        subject = self._bus.subjects.response(record.request_id)
        with contextlib.suppress(Conflict):
            await self._bus.append(subject, record, expected_last=0)

    async def recall(self, request_id: str) -> StoredResponse | None:
        """Return a record, unless it was deleted or has expired."""
        subjects = self._bus.subjects
        found = await self._bus.last(subjects.response_stream, subjects.response(request_id), StoredResponse)
        return None if found is None or found.message.deleted else found.message

    async def forget(self, record: StoredResponse) -> None:
        """Put an empty record in its place, which keeps the id taken."""
        gone = record.model_copy(update={"deleted": True, "before": (), "body": AskedResponse(input="")})
        await self._bus.append(self._bus.subjects.response(record.request_id), gone)

    async def chunks(self, request_id: str) -> Sequence[OutputChunk]:
        """Return the output as far as it has come."""
        subjects = self._bus.subjects
        stored = await self._bus.read(subjects.out_stream, subjects.out(request_id), OutputChunk)
        return [entry.message for entry in stored]

    @contextlib.asynccontextmanager
    async def follow(self, request_id: str) -> AsyncIterator[AsyncIterator[OutputChunk]]:
        """Yield the output from its beginning to its end, as it comes."""
        async with follow(self._bus, request_id) as generation:
            yield aiter(generation)

    async def cancel(self, request_id: str) -> None:
        """Ask until the final chunk is seen, or for a few seconds."""
        cancel, subject = Cancel(request_id=request_id), self._bus.subjects.cancel(request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                while not await self._has_ended(request_id):
                    await self._bus.publish(subject, cancel)
                    await self._wait_for_end(request_id)

    async def _wait_for_end(self, request_id: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_PERIOD_S):
                while True:
                    await asyncio.sleep(CANCEL_POLL_S)
                    if await self._has_ended(request_id):
                        return

    async def _has_ended(self, request_id: str) -> bool:
        subjects = self._bus.subjects
        last = await self._bus.last(subjects.out_stream, subjects.out(request_id), OutputChunk)
        return last is not None and last.message.final
