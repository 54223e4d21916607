"""Runs one translated request and delivers its answer, streamed or whole.

The generations are left at once when the client goes away: that cancels them, whether they run or wait in the queue.
"""

import logging
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from schemas.errors import InternalError, NatterjackError, from_body
from schemas.output import OutputChunk
from services.gateway import spans
from services.gateway.connection import Client, ClientGone, EventWriter, alongside, until_disconnect
from services.gateway.forms import Events, Form
from services.gateway.pipeline import Generations

log = logging.getLogger(__name__)


class Delivery:
    """One request on its way to an answer: where its chunks come from, and how they are written."""

    def __init__(self, source: AbstractAsyncContextManager[Generations], form: Form) -> None:
        self._source = source
        self._form = form

    async def whole(self, receive: Receive) -> Response:
        """Return the answer when it is complete; raises coded errors, ClientGone."""
        async with until_disconnect(receive) as client, self._source as generations:
            client.check()
            fold = self._form.fold(generations.accepted)
            async for prompt, chunk in generations.chunks:
                client.check()
                fold.add(prompt, _checked(chunk))
        spans.describe_usage(fold.usages)
        return Response(fold.body(), media_type="application/json")

    async def stream(self, receive: Receive, send: Send, keepalive_s: float) -> None:
        """Send the answer as it comes; raises coded errors only while no byte has been sent, and ClientGone.

        Until the first chunk, or the first keep-alive comment, the status is open: a request that fails by then fails
        with a real one.
        """
        async with until_disconnect(receive) as client, self._source as generations:
            client.check()
            writer = EventWriter(send)
            events = self._form.events(generations.accepted)
            if opening := events.begin():
                await writer.write(opening)
            async with alongside(writer.keep_alive(keepalive_s, events.keep_alive)):
                last_events = await _write_chunks(client, writer, generations, events)
            await writer.write(last_events, is_last=True)


async def _write_chunks(client: Client, writer: EventWriter, generations: Generations, events: Events) -> bytes:
    """Write all chunks, and return what is to end the stream."""
    try:
        async for prompt, chunk in generations.chunks:
            client.check()
            if written := events.chunk(prompt, _checked(chunk)):
                await writer.write(written)
    except ClientGone:
        raise
    except NatterjackError as error:
        if not writer.has_begun:
            raise
        log.info("ended a stream with an error: %s", error.code)
        return events.failure(error.body())
    except Exception:
        if not writer.has_begun:
            raise
        log.exception("a bug while streaming")
        return events.failure(InternalError("An internal error occurred; the log has the cause.").body())
    spans.describe_usage(events.usages)
    return events.end()


class EventStream(Response):
    """The response that lets a delivery write to the connection itself."""

    def __init__(self, delivery: Delivery, keepalive_s: float) -> None:
        super().__init__()
        self._delivery = delivery
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._delivery.stream(receive, send, self._keepalive_s)


def _checked(chunk: OutputChunk) -> OutputChunk:
    if chunk.error is not None:
        raise from_body(chunk.error)
    return chunk
