"""Takes accepted requests from the work queue, as many as may wait, each resumed behind its log. An edge module."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from schemas.errors import InternalError, InvalidRequest, NatterjackError
from schemas.generation import PRIORITIES, Priority, WorkItem
from schemas.output import OutputChunk
from services.runtime.bus import Bus, Delivery
from services.runtime.telemetry import TRACE_HEADER
from services.scheduler.custody import Custody, Ledger
from services.scheduler.dead_letters import unreadable_work
from services.scheduler.recovery import durable_output
from services.scheduler.requests import Request, new_request
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

FETCH_BATCH = 64
FETCH_TIMEOUT_S = 2.0
PAUSE_S = 0.5
EPOCHS_PER_DELIVERY = 1 << 20
"""Whoever holds an earlier delivery of a request stays below, however often it opens the output again."""


class Intake:
    """The way from the queue into the book."""

    def __init__(self, bus: Bus, model: str, settings: SchedulerSettings, ledger: Ledger, custody: Custody) -> None:
        self._bus = bus
        self._model = model
        self._settings = settings
        self._book, self._outbox, self._meters = ledger.book, ledger.outbox, ledger.meters
        self._custody = custody
        self._rooms = {priority: asyncio.Event() for priority in PRIORITIES}

    def made_room(self) -> None:
        """Fewer requests may wait than before."""
        for room in self._rooms.values():
            room.set()

    async def pull(self, stands_by: Callable[[], bool]) -> None:
        """Pull by credit, for ever: only as many requests as may wait here, and none while another one should.

        Each priority has a credit of its own, so that whatever is urgent gets past what already waits.
        """
        async with asyncio.TaskGroup() as loops:
            for priority in PRIORITIES:
                loops.create_task(self._pull_class(priority, stands_by))

    async def _pull_class(self, priority: Priority, stands_by: Callable[[], bool]) -> None:
        subjects = self._bus.subjects
        while True:
            room = self._book.room_for(priority, self._settings.max_waiting)
            if room <= 0 or stands_by():
                self._rooms[priority].clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await self._rooms[priority].wait()
                continue
            try:
                deliveries = await self._bus.fetch(
                    subjects.work_stream,
                    subjects.work_consumer(self._model, priority),
                    WorkItem,
                    batch=min(room, FETCH_BATCH),
                    timeout_s=FETCH_TIMEOUT_S,
                )
            except NatterjackError as error:
                log.warning("no work could be pulled: %s", error.message)
                await asyncio.sleep(PAUSE_S)
                continue
            for delivery in deliveries:
                await self._take_safely(delivery)

    async def withdraw(self) -> None:
        """Fetch no more: what is given back from now on goes to others."""
        subjects = self._bus.subjects
        for priority in PRIORITIES:
            await self._bus.transport.withdraw(subjects.work_stream, subjects.work_consumer(self._model, priority))

    async def _take_safely(self, delivery: Delivery[WorkItem]) -> None:
        try:
            await self._take(delivery)
        except NatterjackError as error:  # the queue hands it out again
            log.warning("a request could not be taken: %s", error.message)

    async def _take(self, delivery: Delivery[WorkItem]) -> None:
        work, now_s = delivery.message, time.time()
        self._meters.delivered(delivery.num_delivered)
        if work is None:
            await self._end_unreadable(delivery, now_s)
            return
        if (held := self._book.get(work.request_id)) is not None:  # redelivered to ourselves: we still hold it
            held.handle = delivery
            return
        try:
            request = await self._request_of(work, delivery, now_s)
        except InvalidRequest as unreadable:
            log.error("an output log is unreadable: %s", unreadable.message, extra={"request_id": work.request_id})
            self._end_at_once(work, delivery, now_s, InternalError("What was generated so far cannot be read."))
            return
        if request is None:
            await self._bus.settle(delivery, "ack")
            return
        num_failed = await self._num_failed(work, delivery)
        error = self._book.add(request, now_s)
        if num_failed >= self._settings.max_deliver:
            error = InternalError(f"Gave up after {num_failed} attempts to serve this request.")
        if error is not None:
            self._custody.fail(request, error)
        elif request.is_finished:
            self._outbox.open(request)
        self._custody.changed()

    async def _num_failed(self, work: WorkItem, delivery: Delivery[WorkItem]) -> int:
        """Return how many attempts to serve a request have failed; one that was given back on purpose has not."""
        num_before = delivery.num_delivered - 1
        if num_before < self._settings.max_deliver:
            return num_before
        return num_before - await self._custody.handed_back.count(work.request_id)

    async def _end_unreadable(self, delivery: Delivery[WorkItem], now_s: float) -> None:
        reason = "The request could not be read from the queue."
        log.error("an unreadable work item: %s", delivery.error)
        work = unreadable_work(delivery, self._model)
        if work is not None:
            self._end_at_once(work, delivery, now_s, InternalError(reason))
            return
        self._meters.gave_up()
        self._custody.dead_letters.bury("unknown", delivery, reason)
        await self._bus.settle(delivery, "terminate")

    def _end_at_once(self, work: WorkItem, delivery: Delivery[WorkItem], now_s: float, error: NatterjackError) -> None:
        """Hold a request only until its end is stored, above every earlier writer of its output."""
        epoch = delivery.num_delivered * EPOCHS_PER_DELIVERY
        request = new_request(work, delivery, now_s=now_s, epoch=epoch)
        self._book.add(request, now_s)
        self._custody.fail(request, error)

    async def _request_of(self, work: WorkItem, delivery: Delivery[WorkItem], now_s: float) -> Request | None:
        """Return the request, resumed behind what its log holds; None when the log is complete."""
        traceparent = delivery.headers.get(TRACE_HEADER)
        if delivery.num_delivered == 1:
            return new_request(work, delivery, now_s=now_s, traceparent=traceparent)
        subjects = self._bus.subjects
        stored = await self._bus.read(subjects.out_stream, subjects.out(work.request_id), OutputChunk)
        durable = durable_output([entry.message for entry in stored], work.n)
        if durable.is_final:
            return None
        return new_request(
            work,
            delivery,
            now_s=now_s,
            epoch=max(durable.epoch, (delivery.num_delivered - 1) * EPOCHS_PER_DELIVERY) + 1,
            traceparent=traceparent,
            durable=durable.choices,
        )
