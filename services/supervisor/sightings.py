"""What the supervisor last heard from each instance, and whether a silence is the instance's or the bus's.

Plain bookkeeping over registry entries; the clock is an argument.
"""

from dataclasses import dataclass

from schemas.control import Registration

QUIET_S = 1.5
QUIET_BEATS = 3
"""When nobody at all has been heard for so long, and for so many beats, it is the bus that is silent."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The latest heartbeat of one instance."""

    registration: Registration
    seen_s: float


class Sightings:
    """The latest heartbeats of all instances."""

    def __init__(self) -> None:
        self._last: dict[str, Sighting] = {}
        self._newest_s = float("-inf")
        self._audible_since_s = float("-inf")
        self._quiet_s = QUIET_S

    def heard(self, registration: Registration, now_s: float) -> None:
        """Take note of a heartbeat."""
        self._quiet_s = max(QUIET_S, QUIET_BEATS * registration.heartbeat_s)
        if now_s - self._newest_s > self._quiet_s:
            self._audible_since_s = now_s
        self._newest_s = now_s
        self._last[registration.instance] = Sighting(registration, now_s)

    def of(self, instance: str, pid: int) -> Registration | None:
        """Return the latest heartbeat of this life of an instance."""
        sighting = self._last.get(instance)
        return sighting.registration if sighting and sighting.registration.pid == pid else None

    def silence_s(self, instance: str, now_s: float) -> float:
        """Return how long an instance has been silent while others, or the bus, could be heard.

        After a silence of the whole bus everybody gets time to come back.
        """
        sighting = self._last.get(instance)
        if sighting is None or now_s - self._newest_s > self._quiet_s:
            return 0.0
        return now_s - max(sighting.seen_s, self._audible_since_s)
