"""Drives one executor on the bus: its lease, its plans and results, its talks with the cache manager. An edge module.

All decisions are in `executor_state`; this file only moves messages, and begins a new epoch when something was lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from schemas.cache import CacheCommand, CacheReply, Grant, Operation
from schemas.control import Registration
from schemas.errors import InvalidRequest, NatterjackError, PayloadTooLarge, PoolUnknown, StaleEpoch
from schemas.step import StepPlan, StepResult
from services.runtime.bus import Bus, Incoming
from services.runtime.transport import Subscription
from services.scheduler.executor_state import ExecutorState, OutOfStep, Progress
from services.scheduler.leasing import HeldLease, Leases
from services.scheduler.message_sizes import cut
from services.scheduler.planner import Limits
from services.scheduler.requests import Sequence
from services.scheduler.settings import SchedulerSettings
from services.scheduler.unanswered import Unanswered

log = logging.getLogger(__name__)

CACHE_TIMEOUT_S = 1.0
"""A hung cache manager takes a question along; whoever stands by has the books soon after."""
CACHE_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """What a session tells the service: tokens, sequences that may run, sequences that must wait again.

    The last two come with the executor's name; `admitted` also with the Unix time at which blocks were asked for, and
    `returned` with whether the epoch was lost.
    """

    progressed: Callable[[list[Progress]], None]
    admitted: Callable[[str, list[Sequence], float], None]
    returned: Callable[[str, list[Sequence], bool], None]
    changed: Callable[[], None]


class ExecutorSession:
    """One executor in one of its lives, from taking its lease to losing it."""

    def __init__(
        self, bus: Bus, registration: Registration, settings: SchedulerSettings, leases: Leases, events: SessionEvents
    ) -> None:
        if registration.capacity is None:
            raise ValueError(f"{registration.instance} has not published its capacity")
        self.executor = registration.instance
        self.incarnation = registration.incarnation
        self.state: ExecutorState | None = None
        self._bus = bus
        self._model = registration.model
        self._capacity = registration.capacity
        self._settings = settings
        self._leases = leases
        self._events = events
        self._held: HeldLease | None = None
        self._subscription: Subscription | None = None
        self._asking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_open = False
        self._manager_epoch = 0
        self._unanswered = Unanswered()

    # ---- life

    async def open(self) -> bool:
        """Take the lease and begin an epoch; False while another scheduler holds it."""
        held = await self._leases.take(self.executor, self.incarnation)
        if held is None:
            return False
        self._held = held
        subject = self._bus.subjects.result(self.executor)
        self._subscription = await self._bus.subscribe(subject, StepResult, self._on_result)
        self._begin(held.epoch)
        return True

    def _begin(self, epoch: int) -> None:
        self._is_open = False
        self._unanswered = Unanswered()
        self.state = ExecutorState(
            executor=self.executor,
            incarnation=self.incarnation,
            epoch=epoch,
            capacity=self._capacity,
            limits=replace(limits_of(self._settings), max_plan_bytes=self._bus.transport.max_payload // 2),
            depth=self._settings.plan_depth,
        )
        log.info("driving %s in epoch %d", self.executor, epoch)

    async def restart(self, reason: str) -> None:
        """Begin a new epoch: every sequence waits again, with the tokens that are known."""
        log.warning("%s: %s; beginning a new epoch", self.executor, reason)
        self._give_up_sequences()
        held = await self._leases.take(self.executor, self.incarnation)
        if held is not None:
            self._held = held
            self._begin(held.epoch)
        self._events.changed()

    def _give_up_sequences(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self.state is not None:
            sequences, self.state = self.state.abandon(), None
            self._events.returned(self.executor, sequences, True)

    async def close(self, *, give_back: bool) -> None:
        """Stop driving; with `give_back` the lease is free for others at once."""
        if self._restarting is not None:
            self._restarting.cancel()
        self._give_up_sequences()
        if self._subscription is not None:
            await self._subscription.close()
        if give_back and self._held is not None:
            await self._leases.give_back(self._held)

    async def check(self, now_s: float) -> bool:
        """Renew the lease and look for a step without an answer; False when the executor is no longer ours."""
        if self._restarting is not None and not self._restarting.done():
            return True  # the lease is being taken anew; renewing the old one would only get in its way
        if self._held is None or not await self._leases.renew(self._held):
            return False
        since = self.state.waiting_since() if self.state is not None else None
        if since is not None and now_s - since > self._settings.step_timeout_s:
            await self.restart(f"no result within {self._settings.step_timeout_s:g} s")
        elif self.state is None:
            await self.restart("no epoch")
        return True

    # ---- steps

    def _on_result(self, incoming: Incoming[StepResult]) -> None:
        result, state = incoming.message, self.state
        if state is None or result.epoch != state.epoch:
            return
        self._unanswered.answered(result.step, result.duration_s, time.monotonic())
        try:
            progress = state.apply_result(result)
        except OutOfStep as error:
            self._restart_soon(str(error))
            return
        self._events.progressed(progress)

    def _restart_soon(self, reason: str) -> None:
        self._give_up_sequences()
        self._restarting = asyncio.get_running_loop().create_task(self._restart_safely(reason))

    async def _restart_safely(self, reason: str) -> None:
        try:
            await self.restart(reason)
        except NatterjackError as error:  # the next check tries again
            log.warning("%s: no new epoch yet: %s", self.executor, error.message)

    def next_plans(self, scheduler: str) -> list[tuple[str, StepPlan]]:
        """Return the plans to send now: (subject, message)."""
        plans: list[tuple[str, StepPlan]] = []
        while self.state is not None and (plan := self.state.next_plan(scheduler, time.time())) is not None:
            self._unanswered.sent(plan, time.monotonic())
            plans.append((self._bus.subjects.plan(self.executor), plan))
        return plans

    def overdue_plans(self) -> list[tuple[str, StepPlan]]:
        """Return the plans to send again: they, or their results, may have been lost with nothing to follow them."""
        if self.state is None:
            return []
        plans = self._unanswered.overdue(time.monotonic())
        if plans:
            log.info("%s has not answered; sending %d plans again", self.executor, len(plans))
        return [(self._bus.subjects.plan(self.executor), plan) for plan in plans]

    # ---- leases on blocks

    def ask_cache(self, scheduler: str) -> None:
        """Send what the cache manager has to know, one command at a time."""
        if self.state is None or (self._asking is not None and not self._asking.done()):
            return
        operations = self.state.cache_operations()
        if operations or not self._is_open:
            task = self._ask(self.state, scheduler, operations)
            self._asking = asyncio.get_running_loop().create_task(task)

    async def _ask(self, state: ExecutorState, scheduler: str, operations: list[Operation]) -> None:
        """Ask until there is an answer: goals are absolute, so asking again does no harm."""
        asked_s = time.time()
        while True:
            try:
                reply = await self._command(state, scheduler, operations)
                if reply.manager_epoch >= self._manager_epoch:
                    break
                log.warning("ignored an answer of a cache manager that was replaced")
            except PoolUnknown:
                self._is_open = False
            except (StaleEpoch, InvalidRequest, PayloadTooLarge) as error:  # asking again would not help
                self._restart_soon(error.message)
                return
            except NatterjackError as error:
                log.warning("the cache manager does not answer: %s", error.message)
                await asyncio.sleep(CACHE_RETRY_S)
        if state is not self.state:
            return
        self._is_open, self._manager_epoch = True, reply.manager_epoch
        admitted, returned = state.apply_grants(reply)
        self._asking = None
        self._events.admitted(self.executor, admitted, asked_s)
        self._events.returned(self.executor, returned, False)
        self._events.changed()

    async def _command(self, state: ExecutorState, scheduler: str, operations: list[Operation]) -> CacheReply:
        """Send the operations, in as many messages as they need, and return all grants with the last reply.

        Each reply has all copies that the state has not heard of, so the last one has those of every part.
        """
        opening: list[Operation] = [] if self._is_open else [state.open_pool()]
        subject = self._bus.subjects.cache(self._model)
        grants: list[Grant] = []
        for part in cut(opening + operations, self._bus.transport.max_payload // 2):
            command = CacheCommand(
                scheduler=scheduler,
                executor=self.executor,
                epoch=state.epoch,
                operations=tuple(part),
                num_copies=state.num_copies,
            )
            reply = await self._bus.request(subject, command, CacheReply, timeout_s=CACHE_TIMEOUT_S)
            grants += reply.grants
        return reply.model_copy(update={"grants": tuple(grants)})


def limits_of(settings: SchedulerSettings) -> Limits:
    """Return what one executor is given at most."""
    return Limits(
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.lookahead_tokens,
        target_itl_s=settings.target_itl_ms / 1e3,
        ageing_s=settings.ageing_s,
    )
