"""Tells a service's condition from its heartbeats."""

import time

from services.supervisor.child import Child
from services.supervisor.keeper import Condition
from services.supervisor.settings import DeadlineSettings
from services.supervisor.sightings import Sightings

DEADLINE_BY_STAGE = {"connecting": "connect_s", "warming up": "warm_up_s"}
"""Which setting limits a stage; every other stage is a kind of loading."""


class ServiceProbe:
    """The probe of one service instance."""

    def __init__(self, instance: str, sightings: Sightings, deadlines: DeadlineSettings) -> None:
        self._instance = instance
        self._sightings = sightings
        self._deadlines = deadlines

    async def condition(self, child: Child) -> Condition:
        """Return what the instance last said of itself."""
        registration = self._sightings.of(self._instance, child.pid)
        if registration is None:
            return Condition(False, "starting process", self._deadlines.connect_s, "connect_s")
        key = DEADLINE_BY_STAGE.get(registration.stage, "load_s")
        return Condition(
            is_ready=registration.state == "ready",
            stage=registration.stage or "connecting",
            deadline_s=getattr(self._deadlines, key),
            deadline_key=key,
            progress=registration.progress or None,
            detail=registration.detail,
            silence_s=self._sightings.silence_s(self._instance, time.monotonic()),
        )
