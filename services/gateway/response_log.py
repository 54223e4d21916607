"""The Responses endpoints' log on the bus. An edge module: the only one of theirs that knows the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from schemas.control import Cancel
from schemas.errors import Conflict
from schemas.generation import Accepted, GenerateRequest
from schemas.output import OutputChunk
from schemas.responses import AskedResponse, StoredResponse
from services.runtime.bus import Bus
from services.runtime.generation import follow, submit

CANCEL_PERIOD_S = 0.5
CANCEL_POLL_S = 0.05
CANCEL_TIMEOUT_S = 5.0


class BusResponseLog:
    """Records in a stream of their own, with one message per response; output in the output log."""

    def __init__(self, bus: Bus, accept_timeout_s: float) -> None:
        self._bus = bus
        self._accept_timeout_s = accept_timeout_s

    async def submit(self, request: GenerateRequest) -> Accepted:
        """Have a request accepted that goes on without a reader."""
        return await submit(self._bus, request, accept_timeout_s=self._accept_timeout_s)

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
