"""Every request that this scheduler answers for, from its delivery to the acknowledgement of its end. An edge module.

Ends requests (done, failed, cancelled, past the deadline, another's), sees to it that each has a living tokenizer, and
gives everything back when the scheduler leaves. Knows no executors: whoever drives them is told what ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from schemas.control import Cancel
from schemas.errors import Cancelled, InternalError, NatterjackError
from schemas.generation import WorkItem
from schemas.output import Feedback, OutputFeedback
from services.runtime.bus import Delivery, Incoming
from services.runtime.service import Context
from services.scheduler.book import RequestBook, expired
from services.scheduler.dead_letters import DeadLetters
from services.scheduler.executor_state import Progress
from services.scheduler.handed_back import HandedBackNotes
from services.scheduler.meters import SchedulerMeters
from services.scheduler.outbox import Outbox
from services.scheduler.request_spans import RequestSpans
from services.scheduler.requests import Request, Sequence

log = logging.getLogger(__name__)

MAX_RESTARTS = 5


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where requests are written down: the book, the news for tokenizers, the meters."""

    book: RequestBook
    outbox: Outbox
    meters: SchedulerMeters


class Custody:
    """Owner of the requests' ends."""

    def __init__(
        self,
        context: Context,
        model: str,
        ledger: Ledger,
        *,
        take_out: Callable[[Sequence], None],
        changed: Callable[[], None],
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._model = model
        self._book, self._outbox, self._meters = ledger.book, ledger.outbox, ledger.meters
        self._spans = RequestSpans(context.tracing)
        self._take_out = take_out
        self.changed = changed
        self.dead_letters = DeadLetters(context.bus, context.instance)
        self.handed_back = HandedBackNotes(context.bus, context.instance)
        self._settling: set[asyncio.Task[None]] = set()

    # ---- ends

    def fail(self, request: Request, error: NatterjackError) -> None:
        """End a request with an error; its final chunk is written by its tokenizer."""
        if request.error is not None:
            return
        request.error = error
        if isinstance(error, InternalError):
            self._meters.gave_up()
            self.dead_letters.bury(request.work.request_id, delivery_of(request), error.message)
        request.quiet_since_s = time.time()
        for sequence in request.sequences:
            self._spans.ended(sequence, error.code, request.quiet_since_s)
            self._end(sequence)
        self.place_output(request)
        self._outbox.fail(request)
        self.changed()

    def _end(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        sequence.status = "finished"

    def _let_go(self, request: Request) -> None:
        for sequence in request.sequences:
            self._end(sequence)
        self._book.remove(request)
        self._meters.let_go(request)
        self.changed()

    def on_cancel(self, incoming: Incoming[Cancel]) -> None:
        """End a request that a client gave up, or remember that it did: the request may be on its way here."""
        cancel = incoming.message
        request = self._book.get(cancel.request_id)
        if request is None:
            self._book.remember_cancelled(cancel.request_id, time.time())
        elif not request.is_finished:
            self._meters.cancelled(request)
            self.fail(request, Cancelled(f"The request was {cancel.reason}."))

    # ---- what tokenizers say

    def on_feedback(self, incoming: Incoming[OutputFeedback]) -> None:
        """Take what became of outputs."""
        for item in incoming.message.items:
            request = self._book.get(item.request_id)
            if request is not None and item.epoch == request.epoch:
                self._hear(request, item)
        self.changed()

    def _hear(self, request: Request, item: Feedback) -> None:
        match item.event:
            case "stopped":
                self._end(request.sequences[item.index])
                request.quiet_since_s = time.time()
            case "stored":
                self._meters.stored(request)
                task = asyncio.get_running_loop().create_task(self._acknowledge(request))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)
                self._let_go(request)
            case "lost":
                self.place_output(request)
                self._outbox.reopen(request)
            case "fenced":
                log.warning("another writer took over", extra={"request_id": item.request_id})
                self._let_go(request)

    async def _acknowledge(self, request: Request) -> None:
        try:
            await self._bus.settle(delivery_of(request), "ack")
        except NatterjackError as error:  # it will be handed out again, and found complete
            log.warning("not acknowledged: %s", error.message, extra={"request_id": request.work.request_id})

    # ---- what executors say

    def on_progress(self, progress: list[Progress]) -> None:
        """Pass new tokens and ends on to the tokenizers."""
        now_s = time.time()
        self._meters.progressed(progress, now_s)
        for item in progress:
            request = item.sequence.request
            request.quiet_since_s = now_s
            request.num_restarts = 0
            if item.finish_reason == "error":
                self.fail(request, InternalError("The model produced values that are not finite numbers."))
                continue
            if not request.is_open:
                self.place_output(request)
            self._outbox.add(item)
        self.changed()

    def on_admitted(self, executor: str, sequences: list[Sequence], asked_s: float) -> None:
        """Note that sequences have left the waiting ones; an executor's blocks were asked for at a Unix time."""
        now_s = time.time()
        self._meters.admitted(sequences, now_s)
        self._spans.admitted(executor, sequences, asked_s, now_s)

    def on_returned(self, executor: str, sequences: list[Sequence], was_lost: bool) -> None:
        """Sequences wait again; a request that was in too many lost epochs is likely their cause."""
        self._spans.returned(executor, sequences, was_lost, time.time())
        self._meters.returned(sequences, was_lost)
        self._book.wait(sequences)
        for request in {sequence.request for sequence in sequences if was_lost}:
            request.num_restarts += 1
            if request.num_restarts > MAX_RESTARTS:
                self.fail(request, InternalError(f"Gave up: the executor failed {request.num_restarts} times."))
        self.changed()

    # ---- time

    def check(self, now_s: float, output_timeout_s: float) -> None:
        """Drop what is past its deadline; repair outputs whose tokenizer is gone or silent."""
        healthy = self._tokenizers()
        for request in self._book:
            if not request.is_finished and (error := expired(request, now_s)) is not None:
                self.fail(request, error)
            is_orphaned = request.is_open and request.tokenizer not in healthy
            is_silent = request.is_finished and now_s - request.quiet_since_s > output_timeout_s
            if healthy and (is_orphaned or is_silent):
                request.quiet_since_s = now_s
                self.place_output(request)
                self._outbox.reopen(request)
                self.changed()

    def place_output(self, request: Request) -> None:
        """Choose a living tokenizer for a request's output, its own if it lives; a new one must be told to write."""
        healthy = self._tokenizers()
        if healthy and request.tokenizer not in healthy:
            request.tokenizer = healthy[crc32(request.work.request_id.encode()) % len(healthy)]
            if request.is_open:
                self._outbox.close(request)

    def _tokenizers(self) -> list[str]:
        return [r.instance for r in self._context.registry.healthy("tokenizer") if r.model == self._model]

    async def prolong(self) -> None:
        """Tell the queue that every request is still being worked on."""
        for request in self._book:
            await self._bus.settle(delivery_of(request), "progress")

    # ---- leaving

    async def give_back(self, *, silently: bool = False) -> None:
        """Let go of every request; the queue hands them out at once, or `silently`, if others have them as well."""
        requests = list(self._book)
        if not silently and requests:
            await self.handed_back.note([request.work.request_id for request in requests])
        for request in requests:
            self._let_go(request)
            if not silently:
                await self._bus.settle(delivery_of(request), "retry")

    async def settle(self) -> None:
        """Wait until what has ended is acknowledged, and what was given up is stored."""
        if self._settling:
            await asyncio.wait(self._settling)
        await self.dead_letters.settle()


def delivery_of(request: Request) -> Delivery[WorkItem]:
    """Return the delivery that a request came with."""
    if not isinstance(request.handle, Delivery):
        raise TypeError("a request's handle is the delivery that it came with")
    return request.handle
