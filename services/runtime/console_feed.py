"""What consoles and `natterjack top` are told of this process: its finished spans and, every second, its metrics.

An edge module. Nothing waits for it: spans are put into a bounded list where they end, and a task sends them; what does
not fit is dropped and counted. While no console is registered, spans are not even kept, and under much traffic only a
share of the traces is, which the consoles ask for.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from schemas.control import Registration
from schemas.errors import NatterjackError
from schemas.telemetry import TRACE_SHARE, MetricSample, SampledHistogram, SampledValue, SpanBatch
from services.runtime.bus import Bus
from services.runtime.finished_spans import finished_span
from services.runtime.metrics import PREFIX, Histogram, Metrics, Sample, cpu_seconds, resident_bytes
from services.runtime.registry import Registry

log = logging.getLogger(__name__)

PERIOD_S = 0.5
SAMPLE_EVERY = 2
TRACE_IDS = 1 << 32
"""Values of the part of a trace's id by which it is chosen: random in every client's as well, being the last."""
MAX_WAITING = 4096
"""Spans of some seconds at full load; about 4 MB."""
BATCH_SPANS = 64
"""Converting so many takes about a millisecond of the event loop."""

VALUES = frozenset(
    {
        "request_success_total",
        "request_errors_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "requests_accepted_total",
        "num_requests_open",
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "redeliveries_total",
        "dead_letters_total",
        "output_appended_tokens_total",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_sequences_held",
        "executor_busy_seconds_total",
        "stream_messages",
        "stream_full_perc",
    }
)
"""Counters and gauges that a sample holds, of the catalogue's."""
HISTOGRAMS = frozenset(
    {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    }
)
COUNTED = frozenset({"bus_hop_seconds"})
"""Histograms of which only the number of observations is sent, as `…_count`."""


Named = tuple[str, Sample]
"""A sample and its metric's name without the prefix."""


class WaitingSpans(SpanProcessor):
    """Finished spans that nobody has sent yet, `MAX_WAITING` at most; spans end on the engine's thread as well."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._bound = 0
        self._spans: deque[ReadableSpan] = deque()

    def want(self, share: float) -> None:
        """Keep spans of this part of the traces from now on, chosen by id as all instances do; 0: none."""
        self._bound = round(share * TRACE_IDS)

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span if anybody wants its trace, or it failed, and there is room."""
        if not self._bound or (context := span.context) is None:
            return
        is_chosen = context.trace_id % TRACE_IDS < self._bound or span.status.status_code is StatusCode.ERROR
        if not is_chosen:
            return
        if len(self._spans) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        """Return the oldest spans, one batch at most."""
        return [self._spans.popleft() for _ in range(min(len(self._spans), BATCH_SPANS))]


class ConsoleFeed:
    """Sends spans and samples of one instance; use it as an async context manager."""

    def __init__(self, bus: Bus, own: Registration, registry: Registry, metrics: Metrics, *, with_spans: bool) -> None:
        self._bus = bus
        self._own = own
        self._registry = registry
        self._metrics = metrics
        self._with_spans = with_spans
        self._spans = WaitingSpans()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ConsoleFeed":
        if self._with_spans:
            self._bus.tracing.add_processor(self._spans)
        self._task = asyncio.create_task(self._run(), name="console feed")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(NatterjackError):
            await self._send_spans()
        self._spans.want(0.0)

    async def _run(self) -> None:
        beat = 0
        while True:
            self._spans.want(self._wanted_share() if self._with_spans else 0.0)
            try:
                await self._send_spans()
                if beat % SAMPLE_EVERY == 0:
                    await self._bus.publish(self._bus.subjects.samples(self._own.role), self._sample())
            except NatterjackError as error:
                log.debug("the console was not told: %s", error.message)
            except Exception:  # a bug in a gauge must not end the feed
                log.exception("a sample could not be made")
            beat += 1
            await asyncio.sleep(PERIOD_S)

    def _wanted_share(self) -> float:
        consoles = [e.registration for e in self._registry.entries() if e.registration.role == "console" and e.is_fresh]
        return max((console.load.get(TRACE_SHARE, 1.0) for console in consoles), default=0.0)

    async def _send_spans(self) -> None:
        subject = self._bus.subjects.spans(self._own.role)
        while spans := self._spans.take():
            batch = SpanBatch.model_construct(
                instance=self._own.instance,
                role=self._own.role,
                spans=tuple(finished_span(span) for span in spans),
                num_dropped=self._spans.num_dropped,
            )
            await self._bus.publish(subject, batch)
            await asyncio.sleep(0)  # requests go first

    def _sample(self) -> MetricSample:
        samples = [
            (full.removeprefix(PREFIX), sample)
            for full, _, samples_of_family in self._metrics.families()
            for sample in samples_of_family
        ]
        return MetricSample(
            instance=self._own.instance,
            incarnation=self._own.incarnation,
            role=self._own.role,
            time_s=time.time(),
            values=(*_values(samples), *_process_values()),
            histograms=tuple(_histograms(samples)),
        )


def _values(samples: Iterable[Named]) -> Iterator[SampledValue]:
    for name, sample in samples:
        if isinstance(sample.value, Histogram):
            if name in COUNTED:
                yield SampledValue(name=f"{name}_count", labels=_labels(sample), value=sum(sample.value.counts))
        elif name in VALUES and math.isfinite(sample.value):
            yield SampledValue(name=name, labels=_labels(sample), value=sample.value)


def _process_values() -> Iterator[SampledValue]:
    yield SampledValue(name="process_cpu_seconds_total", value=cpu_seconds())
    yield SampledValue(name="process_resident_memory_bytes", value=resident_bytes())


def _histograms(samples: Iterable[Named]) -> Iterator[SampledHistogram]:
    for name, sample in samples:
        if name in HISTOGRAMS and isinstance(sample.value, Histogram) and any(sample.value.counts):
            counts = tuple(sample.value.counts)
            yield SampledHistogram(name=name, labels=_labels(sample), bounds=sample.value.bounds, counts=counts)


def _labels(sample: Sample) -> dict[str, str]:
    return {key: value for key, value in sample.labels.items() if key != "model_name"}
