"""How full the deployment's streams are, as gauges. The server is asked now and then, not by whoever reads the page."""

import asyncio
import logging
from collections.abc import Callable

from schemas.errors import NatterjackError
from services.runtime.bus import Bus
from services.runtime.metrics import LabelValues, Metrics
from services.runtime.transport import StreamUsage

log = logging.getLogger(__name__)

PERIOD_S = 5.0


class StreamWatch:
    """The streams of one deployment; `run` until cancelled."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._usage: dict[LabelValues, StreamUsage] = {}
        metrics.gauges("stream_messages", lambda: self._each(lambda usage: usage.num_messages))
        metrics.gauges("stream_bytes", lambda: self._each(lambda usage: usage.num_bytes))
        metrics.gauges("stream_full_perc", lambda: self._each(_part_used))

    def _each(self, value: Callable[[StreamUsage], float]) -> dict[LabelValues, float]:
        return {labels: value(usage) for labels, usage in self._usage.items()}

    async def run(self) -> None:
        """Ask every few seconds; a stream that cannot be asked is not shown."""
        while True:
            for kind, stream in (("work", self._bus.subjects.work_stream), ("out", self._bus.subjects.out_stream)):
                await self._ask(kind, stream)
            await asyncio.sleep(PERIOD_S)

    async def _ask(self, kind: str, stream: str) -> None:
        try:
            self._usage[(kind,)] = await self._bus.transport.usage(stream)
        except NatterjackError as error:
            self._usage.pop((kind,), None)
            log.debug("%s was not asked: %s", stream, error.message)


def _part_used(usage: StreamUsage) -> float:
    parts = [usage.num_messages / usage.max_messages if usage.max_messages else 0.0]
    parts.append(usage.num_bytes / usage.max_bytes if usage.max_bytes else 0.0)
    return max(parts)
