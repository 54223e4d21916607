"""The console on the bus: hears spans, samples and heartbeats, answers trace queries, and serves the page.

The only file here that knows the bus. Nothing that serves a request waits for this service or knows that it exists.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from schemas.control import Registration
from schemas.telemetry import TRACE_SHARE, MetricSample, SpanBatch, TraceQuery, TraceReply
from services.console.access import LOOPBACK_NAMES
from services.console.app import Pages, build_app, load_files
from services.console.http_server import HttpServer
from services.console.live import Live
from services.console.overview import History, overview
from services.console.roster import Roster
from services.console.samples import Samples
from services.console.settings import ConsoleSettings, Settings
from services.console.trace_ring import TraceRing
from services.console.trace_share import TraceShare
from services.console.waterfall import waterfall
from services.runtime.bus import Incoming, Server
from services.runtime.control import Command
from services.runtime.service import Context
from services.runtime.transport import Subscription

log = logging.getLogger(__name__)

TICK_S = 1.0
QUEUE_GROUP = "console"


class ConsoleService:
    """Looks on from start to stop."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings.console
        self._context = context
        self._traces = TraceRing(settings.console.max_requests)
        self._samples = Samples()
        self._roster = Roster()
        self._share = TraceShare(settings.console.max_traces_per_s)
        self._live = Live(self._traces, History())
        pages = Pages(self._traces, self._live, load_files(), lambda: self._http.is_stopping)
        self._http = HttpServer(build_app(pages, keys_of(settings.console)))
        self._subscriptions: list[Subscription] = []
        self._server: Server[TraceQuery] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on the bus, take the port, begin to tick; raises StartFailed when the port is taken."""
        bus, registry = self._context.bus, self._context.registry
        self._context.heartbeat.measure_load(lambda: {TRACE_SHARE: self._share.value})
        registry.listen(self._on_heartbeat)
        for entry in registry.entries():
            self._on_heartbeat(entry.registration, entry.registration.instance)
        self._subscriptions = [
            await bus.subscribe(bus.subjects.spans_all, SpanBatch, self._on_spans),
            await bus.subscribe(bus.subjects.samples_all, MetricSample, self._on_sample),
        ]
        self._server = await bus.serve(bus.subjects.trace(), TraceQuery, self._answer, queue=QUEUE_GROUP)
        url = await self._http.start(self._settings.host, self._settings.port)
        if self._settings.host not in LOOPBACK_NAMES and not keys_of(self._settings):
            log.warning(
                "the console listens on %s, but without console.api_keys it answers only at a loopback name", url
            )
        self._context.progress("serving the console", detail=f"{url}/console")
        log.info("serving the console on %s/console", url)
        self._ticking = asyncio.create_task(self._tick(), name="tick")

    def _on_heartbeat(self, registration: Registration | None, instance: str) -> None:
        self._roster.heard(registration, instance, time.monotonic())

    def _on_spans(self, incoming: Incoming[SpanBatch]) -> None:
        self._traces.add(incoming.message)

    def _on_sample(self, incoming: Incoming[MetricSample]) -> None:
        self._samples.add(incoming.message, time.monotonic())

    async def _answer(self, incoming: Incoming[TraceQuery]) -> TraceReply:
        name = incoming.message.request
        return waterfall(self._traces.find(name), name)

    async def _tick(self) -> None:
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            self._samples.forget_silent(now_s)
            share = self._share.adapt(self._samples.rate("requests_accepted_total", now_s))
            self._live.tick(overview(self._roster, self._samples, now_s, time.time()), share)
            due_s = max(due_s + TICK_S, now_s)
            await asyncio.sleep(due_s - now_s)

    async def wait(self) -> None:
        """End when the HTTP server or the ticking ends, which is a failure."""
        if self._ticking is not None:
            waiting = asyncio.ensure_future(self._http.wait())
            try:
                await asyncio.wait({waiting, self._ticking}, return_when=asyncio.FIRST_COMPLETED)
                for task in (waiting, self._ticking):
                    if task.done():
                        task.result()
            finally:
                waiting.cancel()

    async def drain(self) -> None:
        """Nothing has to be finished: pages reconnect."""

    async def stop(self) -> None:
        """Close the page's streams and the subscriptions."""
        await self._http.stop()
        if self._ticking is not None:
            self._ticking.cancel()
        for subscription in self._subscriptions:
            await subscription.close()
        if self._server is not None:
            await self._server.close()

    def commands(self) -> Mapping[str, Command]:
        """Nothing beyond what every service can be told."""
        return {}


def keys_of(settings: ConsoleSettings) -> tuple[str, ...]:
    """Return the keys that let people in; none: loopback names only."""
    given = settings.api_keys.get_secret_value() if settings.api_keys is not None else ""
    return tuple(filter(None, map(str.strip, given.split(","))))
