"""The executors that this scheduler drives: takes its share, renews its holds, lets go of lost ones. An edge module."""

import logging

from schemas.control import Registration
from services.runtime.bus import Bus
from services.runtime.registry import Entry, Registry
from services.runtime.service import Context
from services.scheduler.executor_state import ExecutorState
from services.scheduler.leasing import Leases
from services.scheduler.requests import Sequence
from services.scheduler.session import ExecutorSession, SessionEvents
from services.scheduler.settings import SchedulerSettings
from services.scheduler.sharing import is_standing_by, may_take_one

log = logging.getLogger(__name__)


class Fleet:
    """One session for each executor that is ours."""

    def __init__(self, context: Context, model: str, settings: SchedulerSettings, events: SessionEvents) -> None:
        self._bus: Bus = context.bus
        self._registry: Registry = context.registry
        self._name = context.instance
        self._model = model
        self._settings = settings
        self._events = events
        self._leases = Leases(context.bus, context.instance, context.incarnation, settings.lease_s)
        self._renewed_s = 0.0
        self.sessions: dict[str, ExecutorSession] = {}
        self.has_lost_leases = False
        """Whether others have, since our last session began, taken what we hold: they have our requests as well."""

    @property
    def states(self) -> list[ExecutorState]:
        """Return what runs on each executor that can be planned for now."""
        return [session.state for session in self.sessions.values() if session.state is not None]

    @property
    def stands_by(self) -> bool:
        """Tell whether the work is to be left to others."""
        return is_standing_by(len(self.sessions), self._other_schedulers())

    def take_out(self, sequence: Sequence) -> None:
        """End a sequence wherever it runs."""
        for state in self.states:
            if state.holds(sequence):
                state.remove(sequence)

    async def check(self) -> None:
        """Open sessions with executors that are there, close those of executors that are not."""
        present = {e.registration.instance: e for e in self._registry.entries() if _is_usable(e, self._model)}
        for name, session in list(self.sessions.items()):
            entry = present.get(name)
            if entry is None or entry.registration.incarnation != session.incarnation:
                log.warning("%s is gone", name)
                del self.sessions[name]
                await session.close(give_back=True)
        num_others = len(self._other_schedulers())
        for name, entry in present.items():
            if name not in self.sessions and may_take_one(len(self.sessions), len(present), num_others):
                session = ExecutorSession(self._bus, entry.registration, self._settings, self._leases, self._events)
                if await session.open():
                    self.sessions[name] = session
                    self.has_lost_leases = False
                    self._events.changed()

    def _other_schedulers(self) -> list[Registration]:
        healthy = self._registry.healthy("scheduler")
        return [r for r in healthy if r.model == self._model and r.instance != self._name]

    async def renew(self, now_s: float) -> None:
        """Renew every hold when it is time; a session whose executor is another's by now ends."""
        if now_s - self._renewed_s < self._settings.lease_s / 3:
            return
        self._renewed_s = now_s
        for name, session in list(self.sessions.items()):
            if not await session.check(now_s):
                log.warning("lost the lease on %s", name)
                self.has_lost_leases = True
                self.sessions.pop(name, None)
                await session.close(give_back=False)

    async def close(self, *, give_back: bool) -> None:
        """Stop driving; with `give_back` others may drive at once."""
        for session in self.sessions.values():
            await session.close(give_back=give_back)


def _is_usable(entry: Entry, model: str) -> bool:
    registration = entry.registration
    is_ours = registration.role == "executor" and registration.model == model
    return is_ours and entry.is_healthy and registration.capacity is not None
