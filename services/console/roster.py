"""Who belongs to the deployment and how each is: what a person sees, told from heartbeats. Pure; time is an argument.

Stricter and more talkative than the registry's view, by which requests are routed: an instance that died and is being
started again is shown as such, and one that vanished without a word stays in sight for a while.
"""

from dataclasses import dataclass
from typing import Literal

from schemas.control import Registration

Health = Literal["ok", "busy", "bad"]

SILENT_BEATS = 3.0
"""Sooner than routing's limit: people are told within seconds."""
GONE_S = 10.0
REMEMBER_GONE_S = 60.0
SHOW_DEATH_S = 3.0
"""A quick restart must not hide that the instance died: a page that looks once a second would miss it."""
RECENT_RESTART_S = 60.0


@dataclass(frozen=True, slots=True)
class Member:
    """One instance as a person sees it."""

    registration: Registration
    is_ready: bool
    health: Health
    state: str


@dataclass(slots=True)
class _Sighting:
    registration: Registration
    heard_s: float
    has_died: bool = False
    restarted_s: float | None = None


class Roster:
    """Everyone heard of lately."""

    def __init__(self) -> None:
        self._seen: dict[str, _Sighting] = {}

    def heard(self, registration: Registration | None, instance: str, now_s: float) -> None:
        """Take note of a heartbeat, or (None) of a leave in order."""
        if registration is None:
            self._seen.pop(instance, None)
            return
        sighting = self._seen.get(instance)
        if sighting is None:
            self._seen[instance] = _Sighting(registration, now_s)
            return
        if registration.incarnation != sighting.registration.incarnation:
            sighting.has_died = sighting.registration.state != "draining"
            sighting.restarted_s = now_s if sighting.has_died else None
        if registration.state == "ready":
            sighting.has_died = False
        sighting.registration, sighting.heard_s = registration, now_s

    def members(self, now_s: float) -> list[Member]:
        """Return everyone by name."""
        for name, sighting in list(self._seen.items()):
            if now_s - sighting.heard_s > GONE_S + REMEMBER_GONE_S:
                del self._seen[name]
        return [Member(s.registration, *_judge(s, now_s)) for _, s in sorted(self._seen.items())]


def _judge(sighting: _Sighting, now_s: float) -> tuple[bool, Health, str]:
    registration, age_s = sighting.registration, now_s - sighting.heard_s
    if age_s > GONE_S:
        return False, "bad", f"gone for {age_s:.0f} s"
    if age_s > registration.heartbeat_s * SILENT_BEATS:
        return False, "bad", f"silent for {age_s:.0f} s"
    if registration.state == "failed":
        return False, "bad", "failed"
    if registration.state == "draining":
        return False, "busy", "draining"
    if registration.state == "starting":
        return (False, *_starting(sighting))
    return (True, *_ready(sighting, now_s))


def _starting(sighting: _Sighting) -> tuple[Health, str]:
    registration = sighting.registration
    progress = f" {registration.progress:.0%}" if 0 < registration.progress < 1 else ""
    stage = f"{registration.stage or 'starting'}{progress}"
    return ("bad", f"died, {stage}") if sighting.has_died else ("busy", stage)


def _ready(sighting: _Sighting, now_s: float) -> tuple[Health, str]:
    since_s = now_s - sighting.restarted_s if sighting.restarted_s is not None else RECENT_RESTART_S
    if since_s < SHOW_DEATH_S:
        return "bad", "died, ready again"
    return "ok", f"ready, died {since_s:.0f} s ago" if since_s < RECENT_RESTART_S else "ready"
