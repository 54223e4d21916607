"""Writes one request's output log: one append in flight, each by compare-and-set. An edge module: it talks to the bus.

Whoever lost the log to a writer of a higher epoch stops. An append whose answer was lost is looked up, never repeated
blindly. After a takeover the new writer's first message fences the old one.
"""

import asyncio
import logging

from schemas.errors import Conflict, InternalError, InvalidRequest, NatterjackError, PayloadTooLarge
from schemas.output import OutputChunk
from services.runtime.bus import Bus, Stored
from services.tokenizer.request_output import RequestOutput

log = logging.getLogger(__name__)

RETRY_S = 0.2


class Fenced(Exception):
    """The log has a writer of a higher epoch."""


class LogWriter:
    """The writer of one request's log in one epoch."""

    def __init__(self, bus: Bus, output: RequestOutput) -> None:
        self._bus = bus
        self._output = output
        self._subject = bus.subjects.out(output.spec.request_id)
        self._stream = bus.subjects.out_stream

    async def take_over(self) -> OutputChunk | None:
        """Read what the log holds, go on behind it, and fence earlier writers; raises Fenced.

        Returns the newest chunk of the log that says something, None of a log that says nothing: all before it have
        reached a client that listens to replies, it may not have.
        """
        output = self._output
        while True:
            try:
                stored = await self._bus.read(self._stream, self._subject, OutputChunk)
                if any(entry.message.epoch > output.epoch for entry in stored):
                    raise Fenced
                chunks = [entry.message for entry in stored]
                position = stored[-1].sequence if stored else 0
                if not (chunks and chunks[-1].final):
                    position = await self._append_fence(position)
                output.restore(chunks)
                output.log_sequence = position
                return next((chunk for chunk in reversed(chunks) if chunk.final or chunk.choices), None)
            except InvalidRequest as error:
                log.error("the log is unreadable: %s", error.message, extra={"request_id": output.spec.request_id})
                if (final := await self._end_unreadable()) is not None:
                    return final
            except Conflict:  # an old writer was faster: read again
                continue
            except NatterjackError as error:
                log.warning("takeover waits: %s", error.message, extra={"request_id": output.spec.request_id})
                await asyncio.sleep(RETRY_S)

    async def _end_unreadable(self) -> OutputChunk | None:
        """A log that cannot be read cannot be continued: it ends with an error. None while the bus is away."""
        final = self._output.give_up(InternalError("What was generated so far cannot be read.").body())
        try:
            newest = await self._bus.transport.last(self._stream, self._subject)
            await self._bus.append(self._subject, final, expected_last=newest.sequence if newest is not None else 0)
        except NatterjackError as error:
            log.warning("takeover waits: %s", error.message, extra={"request_id": final.request_id})
            await asyncio.sleep(RETRY_S)
            return None
        return final

    async def _append_fence(self, position: int) -> int:
        fence = self._output.chunk().model_copy(update={"usage": None})
        appended = await self._bus.append(self._subject, fence, expected_last=position)
        return appended.sequence

    async def append(self, chunk: OutputChunk) -> OutputChunk:
        """Store a chunk, however often the bus has to be asked, and return it; raises Fenced.

        What no message can hold is replaced: the request then ends with that error.
        """
        output = self._output
        while True:
            try:
                appended = await self._bus.append(self._subject, chunk, expected_last=output.log_sequence)
                output.log_sequence = appended.sequence
                return chunk
            except Conflict:
                if await self._is_stored(chunk):
                    return chunk
            except PayloadTooLarge as error:
                log.error("output is lost: %s", error.message, extra={"request_id": output.spec.request_id})
                chunk = output.give_up(error.body())
            except NatterjackError as error:
                log.warning("append waits: %s", error.message, extra={"request_id": output.spec.request_id})
                await asyncio.sleep(RETRY_S)

    async def is_replaced(self) -> bool:
        """Tell whether the log's newest message is another writer's; not while the bus does not answer."""
        try:
            last = await self._bus.last(self._stream, self._subject, OutputChunk)
        except NatterjackError:
            return False
        return last is not None and last.sequence != self._output.log_sequence

    async def _is_stored(self, chunk: OutputChunk) -> bool:
        """After a conflict: was it our own message, whose answer was lost? Raises Fenced when it was another's."""
        last: Stored[OutputChunk] | None = None
        try:
            last = await self._bus.last(self._stream, self._subject, OutputChunk)
        except InvalidRequest:  # nothing that this writer could have written
            raise Fenced from None
        except NatterjackError as error:
            log.warning("append is unclear: %s", error.message, extra={"request_id": chunk.request_id})
            await asyncio.sleep(RETRY_S)
            return False
        if last is None:  # the log has expired below us: begin again at its start
            self._output.log_sequence = 0
            return False
        if last.message == chunk:
            self._output.log_sequence = last.sequence
            return True
        raise Fenced
