"""The cache manager on the bus: answers cache commands, in order, while the books are its own. An edge module."""

import asyncio
import logging
import time

from pydantic import JsonValue

from schemas.cache import Acquire, CacheCommand, CacheReply
from schemas.control import Registration
from schemas.errors import NatterjackError, Unavailable
from services.cache_manager.ownership import Ownership
from services.cache_manager.pools import Pools
from services.cache_manager.settings import Settings
from services.runtime.bus import Incoming, Server
from services.runtime.control import Arguments, Command
from services.runtime.service import Context

log = logging.getLogger(__name__)

MAX_CONCURRENT = 1024
SWEEP_PERIOD_S = 2.0
CHECKS_PER_LEASE = 4
"""So often a hold is renewed, or asked for, in its life."""


class CacheManagerService:
    """Owner of the bookkeeping of every executor's KV blocks."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings
        self._context = context
        self._pools = Pools()
        self._ownership = Ownership(context, settings.model.name, settings.cache_manager.lease_s)
        self._server: Server[CacheCommand] | None = None
        self._queries = context.metrics.counter("prefix_cache_queries_total")
        self._hits = context.metrics.counter("prefix_cache_hits_total")
        self._host_hits = context.metrics.counter("prefix_cache_host_hits_total")
        context.metrics.gauges("kv_cache_usage_perc", self._pools.usage_by_executor)
        context.metrics.gauges("kv_cache_host_usage_perc", self._pools.host_usage_by_executor)

    async def start(self) -> None:
        """Serve the model's cache subject, or stand by while another instance does."""
        self._context.heartbeat.measure_load(self._load)
        self._context.registry.listen(self._on_registry)
        await self._check_ownership()

    def _load(self) -> dict[str, float]:
        return {**self._pools.usage(), "lease_epoch": self._ownership.epoch}

    async def _check_ownership(self) -> None:
        """Serve exactly while the books are ours; every time that we get them they are empty."""
        epoch = self._ownership.epoch
        is_owner = await self._ownership.check()
        if self._ownership.epoch != epoch:
            self._pools.keep(())
        detail = "" if is_owner else "standing by"
        if self._context.heartbeat.registration.detail != detail:
            self._context.heartbeat.update(detail=detail)
        if is_owner and self._server is None:
            bus = self._context.bus
            subject = bus.subjects.cache(self._settings.model.name)
            self._server = await bus.serve(
                subject, CacheCommand, self._command, max_concurrent=MAX_CONCURRENT, begins_traces=False
            )
        elif not is_owner:
            await self._stand_by()

    async def _stand_by(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _command(self, incoming: Incoming[CacheCommand]) -> CacheReply:
        started_s = time.time()
        command = incoming.message
        if not self._ownership.is_certain:
            raise Unavailable("This cache manager cannot be certain that it still owns the books.")
        reply = self._pools.apply(command).model_copy(update={"manager_epoch": self._ownership.epoch})
        cached = {grant.sequence: grant.num_cached for grant in reply.grants}
        loaded = {grant.sequence: grant.num_loaded for grant in reply.grants}
        self._host_hits.add(sum(loaded.values()))
        for operation in command.operations:
            if isinstance(operation, Acquire):
                self._queries.add(operation.num_tokens)
                self._hits.add(cached.get(operation.sequence, 0))
            if isinstance(operation, Acquire) and operation.traceparent is not None:
                self._context.tracing.record(
                    "cache_manager.acquire",
                    parent=operation.traceparent,
                    start_s=started_s,
                    attributes={
                        "natterjack.request_id": operation.request_id,
                        "natterjack.num_tokens": operation.num_tokens,
                        "gen_ai.usage.cache_read.input_tokens": cached.get(operation.sequence, 0),
                        "natterjack.num_loaded_tokens": loaded.get(operation.sequence, 0),
                    },
                )
        return reply

    def _on_registry(self, registration: Registration | None, instance: str) -> None:
        if registration is None:
            self._pools.forget(instance)

    async def wait(self) -> None:
        """Keep the hold on the books, and the books in order; only a signal ends this."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._keep_ownership())
            loops.create_task(self._sweep())

    async def _keep_ownership(self) -> None:
        while True:
            await asyncio.sleep(self._settings.cache_manager.lease_s / CHECKS_PER_LEASE)
            try:
                await self._check_ownership()
            except NatterjackError as error:
                log.warning("the books could not be served: %s", error.message)

    async def _sweep(self) -> None:
        """Forget, now and then, the pools of executors that vanished without a word."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self._pools.keep({entry.registration.instance for entry in self._context.registry.entries()})

    async def drain(self) -> None:
        """Finish what was asked, and let another one take over."""
        await self._stand_by()
        await self._ownership.give_back()

    def commands(self) -> dict[str, Command]:
        """What only cache managers can be told."""
        return {"flush_cache": self._flush_cache}

    async def _flush_cache(self, arguments: Arguments) -> dict[str, JsonValue]:
        """Nothing that was computed is found again; running sequences keep their blocks."""
        return {"num_flushed_blocks": dict(self._pools.flush())}

    async def stop(self) -> None:
        """Nothing is held outside of memory."""
