"""Looks at a deployment over the bus as its console does: heartbeats and samples in, one overview a second out."""

import asyncio
import time
from collections.abc import AsyncIterator

from schemas.control import Registration
from schemas.telemetry import MetricSample
from services.console.overview import Overview, overview
from services.console.roster import Roster
from services.console.samples import Samples
from services.runtime.bus import Bus, Incoming
from services.runtime.registry import Registry

PERIOD_S = 1.0
FIRST_LOOK_S = 2.2
"""Two samples of every instance, for rates, and the heartbeat of everyone who lives."""


async def overviews(bus: Bus) -> AsyncIterator[Overview]:
    """Yield the deployment as it is, every second."""
    roster, samples = Roster(), Samples()

    def on_heartbeat(registration: Registration | None, instance: str) -> None:
        roster.heard(registration, instance, time.monotonic())

    def on_sample(incoming: Incoming[MetricSample]) -> None:
        samples.add(incoming.message, time.monotonic())

    async with Registry(bus) as registry:
        registry.listen(on_heartbeat)
        for entry in registry.entries():
            on_heartbeat(entry.registration, entry.registration.instance)
        subscription = await bus.subscribe(bus.subjects.samples_all, MetricSample, on_sample)
        try:
            while True:
                now_s = time.monotonic()
                samples.forget_silent(now_s)
                yield overview(roster, samples, now_s, time.time())
                await asyncio.sleep(PERIOD_S)
        finally:
            await subscription.close()


async def one_overview(bus: Bus) -> Overview:
    """Return the deployment as it is, after watching it long enough for rates."""
    started_s = time.monotonic()
    async for seen in overviews(bus):
        if time.monotonic() - started_s >= FIRST_LOOK_S:
            return seen
    raise AssertionError("overviews never end")
