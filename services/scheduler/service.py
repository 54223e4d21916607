"""The scheduler on the bus: its life, its loops, and the ticks in which decisions become messages. An edge module.

Every callback only changes state and asks for a tick; a tick (one per loop turn at most) assigns waiting sequences,
asks the cache manager, and sends plans and token batches through one task, so that messages leave in order. Requests
are in `custody`, executors in `fleet`, and `intake` brings the work.
"""

import asyncio
import logging
import time

from schemas.codec import Message
from schemas.control import Cancel
from schemas.errors import NatterjackError, PayloadTooLarge
from schemas.output import OutputFeedback
from schemas.step import StepPlan
from services.runtime.control import Command
from services.runtime.service import Context
from services.runtime.streams import ensure_work_consumers
from services.runtime.transport import Subscription
from services.scheduler.book import RequestBook
from services.scheduler.custody import Custody, Ledger
from services.scheduler.fleet import Fleet
from services.scheduler.intake import Intake
from services.scheduler.meters import SchedulerMeters
from services.scheduler.outbox import Outbox
from services.scheduler.pausing import Pausing
from services.scheduler.session import SessionEvents, limits_of
from services.scheduler.settings import Settings

log = logging.getLogger(__name__)

CHECK_PERIOD_S = 0.5


class SchedulerService:
    """Owner of every request between the work queue and its final chunk."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings.scheduler
        self._model = settings.model.name
        self._context = context
        self._bus = context.bus
        self._name = context.instance
        self._book = RequestBook(settings.scheduler.ageing_s)
        self._fleet = Fleet(context, self._model, self._settings, self._events())
        self._sessions = self._fleet.sessions
        self._meters = SchedulerMeters(context.metrics, self._book, self._sessions)
        self._outbox = Outbox(self._name, max_batch_bytes=self._bus.transport.max_payload // 2)
        ledger = Ledger(self._book, self._outbox, self._meters)
        self._custody = Custody(context, self._model, ledger, take_out=self._fleet.take_out, changed=self._tick_soon)
        self._intake = Intake(self._bus, self._model, self._settings, ledger, self._custody)
        self._pausing = Pausing(context, self._model, self._tick_soon)
        self._outgoing: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._tick_is_due = False

    def _events(self) -> SessionEvents:
        return SessionEvents(
            progressed=lambda progress: self._custody.on_progress(progress),
            admitted=lambda *admitted: self._custody.on_admitted(*admitted),
            returned=lambda *returned: self._custody.on_returned(*returned),
            changed=self._tick_soon,
        )

    # ---- life

    async def start(self) -> None:
        """Subscribe, then begin to pull work."""
        subjects = self._bus.subjects
        await ensure_work_consumers(self._bus.transport, subjects, self._model, self._settings.request_ack_wait_s)
        self._subscriptions = [
            await self._bus.subscribe(subjects.feedback(self._name), OutputFeedback, self._custody.on_feedback),
            await self._bus.subscribe(subjects.cancel_all, Cancel, self._custody.on_cancel),
        ]
        self._context.heartbeat.measure_load(self._load)
        await self._pausing.read(time.time())
        self._tasks = [
            asyncio.create_task(self._send(), name="send"),
            asyncio.create_task(self._intake.pull(lambda: self._fleet.stands_by), name="pull"),
            asyncio.create_task(self._check_regularly(), name="check"),
        ]

    async def wait(self) -> None:
        """End when one of the loops fails: that is a bug, and the restart resumes every request."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Take nothing new; give running requests back to the queue, from where they are resumed."""
        for task in self._tasks[1:]:  # neither pulls work nor takes the leases again
            task.cancel()
        await asyncio.wait(self._tasks[1:])
        await self._intake.withdraw()
        await self._fleet.close(give_back=True)
        await self._custody.give_back()
        await self._custody.settle()

    async def stop(self) -> None:
        """Cancel what runs; leases that were not given back expire."""
        for task in self._tasks:
            task.cancel()
        await self._fleet.close(give_back=False)
        for subscription in self._subscriptions:
            await subscription.close()

    def commands(self) -> dict[str, Command]:
        """What only schedulers can be told."""
        return {"pause": self._pausing.pause, "resume": self._pausing.resume}

    def _load(self) -> dict[str, float]:
        states = self._fleet.states
        return {
            "num_requests_running": self._book.num_running,
            "num_requests_waiting": self._book.num_waiting,
            "num_executors": len(states),
            "num_tokens_wasted": sum(state.num_wasted for state in states),
            "is_paused": not self._pausing.may_begin,
        }

    # ---- time

    async def _check_regularly(self) -> None:
        prolonged_s = time.time()
        while True:
            now_s = time.time()
            try:
                await self._fleet.check()
                await self._fleet.renew(now_s)
                await self._pausing.read(now_s)
                if self._fleet.stands_by:
                    await self._leave_work_to_others()
                self._custody.check(now_s, self._settings.output_timeout_s)
                for session in self._sessions.values():
                    for message in session.overdue_plans():
                        self._outgoing.put_nowait(message)
                if now_s - prolonged_s > self._settings.request_ack_wait_s / 3:
                    prolonged_s = now_s
                    await self._custody.prolong()
            except NatterjackError as error:
                log.warning("check failed: %s", error.message)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def _leave_work_to_others(self) -> None:
        """Without a word after a lost lease, for then others have the requests as well."""
        if self._book.requests:
            log.warning("%d requests are left to other schedulers", len(self._book.requests))
            await self._intake.withdraw()  # or the queue would hand them to our own waiting pull
            await self._custody.give_back(silently=self._fleet.has_lost_leases)

    # ---- ticks: decisions become messages

    def _tick_soon(self) -> None:
        if not self._tick_is_due:
            self._tick_is_due = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_is_due = False
        if not self._pausing.is_held:
            self._book.assign(
                self._fleet.states,
                limits_of(self._settings),
                self._custody.fail,
                may_begin=self._pausing.may_begin,
            )
        for session in self._sessions.values():
            session.ask_cache(self._name)
            for subject, plan in () if self._pausing.is_held else session.next_plans(self._name):
                self._meters.planned(plan)
                self._outgoing.put_nowait((subject, plan))
        for tokenizer, batch in self._outbox.take():
            self._outgoing.put_nowait((self._bus.subjects.detok(tokenizer), batch))
        self._intake.made_room()

    async def _send(self) -> None:
        while True:
            subject, message = await self._outgoing.get()
            try:
                await self._bus.publish(subject, message)
            except NatterjackError as error:  # whoever misses it notices by its number
                log.warning("a message on %s was lost: %s", subject, error.message)
                if isinstance(error, PayloadTooLarge) and isinstance(message, StepPlan):
                    self._refuse_new(message, error)

    def _refuse_new(self, plan: StepPlan, error: PayloadTooLarge) -> None:
        """A plan is cut to what fits, so the one new sequence of this one is too much for any message."""
        for new in plan.new:
            if (request := self._book.get(new.request_id)) is not None:
                self._custody.fail(request, error)
