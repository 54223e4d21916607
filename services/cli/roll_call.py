"""Asks who of a deployment is alive: only a heartbeat heard now counts, not what the registry remembers."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from schemas.control import PATH_ROLES, Registration, Role
from schemas.errors import NatterjackError
from services.cli.path import REACH_TIMEOUT_S, is_listening, quiet_tracing
from services.runtime.bus import bus_url, open_bus
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings, masked

RETRY_S = 0.3
REQUIRED: tuple[Role, ...] = ("gateway", *PATH_ROLES)


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who answered, which roles have nobody ready, and why nobody could be asked."""

    present: tuple[Registration, ...] = ()
    missing: tuple[Role, ...] = REQUIRED
    error: str = ""

    @property
    def is_ready(self) -> bool:
        """Tell whether every service of the path is ready."""
        return not self.missing

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        services = [entry.model_dump(mode="json") for entry in self.present]
        return {
            "ready": self.is_ready,
            "missing": self.missing,
            "services": services,
            "error": self.error or None,
        }


async def call_until_ready(settings: BusSettings, wait_s: float) -> RollCall:
    """Ask until every service of the path is ready or `wait_s` has passed."""
    deadline_s = time.monotonic() + wait_s
    while True:
        result = await call(settings)
        if result.is_ready or time.monotonic() >= deadline_s:
            return result
        await asyncio.sleep(RETRY_S)


async def call(settings: BusSettings) -> RollCall:
    """Ask once: listen until everyone whom the registry knows has beaten, or had the time to."""
    if not await is_listening(settings):
        return RollCall(error=f"Nothing answers at {masked(bus_url(settings))}: 'natterjack up' starts a deployment.")
    patient = settings.model_copy(update={"connect_timeout_s": REACH_TIMEOUT_S})
    heard: dict[str, Registration] = {}
    changed = asyncio.Event()

    def note(registration: Registration | None, instance: str) -> None:
        changed.set()
        if registration is None:
            heard.pop(instance, None)
        else:
            heard[instance] = registration

    try:
        async with open_bus(patient, quiet_tracing(), name="cli") as bus, Registry(bus) as registry:
            registry.listen(note)
            known = {entry.registration.instance: entry.registration for entry in registry.entries()}
            longest_s = max((entry.silent_after_s for entry in known.values()), default=0.0)
            deadline_s = time.monotonic() + longest_s
            while (remaining_s := deadline_s - time.monotonic()) > 0 and known.keys() - heard.keys():
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), remaining_s)
    except NatterjackError as error:
        return RollCall(error=error.message)
    ready = {entry.role for entry in heard.values() if entry.state == "ready"}
    present = tuple(sorted(heard.values(), key=lambda entry: entry.instance))
    return RollCall(present, tuple(role for role in REQUIRED if role not in ready))
