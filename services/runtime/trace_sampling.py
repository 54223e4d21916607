"""Which traces are exported: a share of all, and always those of requests that failed or were slow.

The share is decided where a trace begins, from its id, and travels in the `traceparent` flag, so that all processes
agree. Spans of the other traces are kept for a while, in bounded memory; when one of them fails or takes long, its
process says so (`on_keep`), every process hears it (`keep`), and what they hold of that trace is exported after all.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

MAX_HELD_SPANS = 10_000
"""Some 10 MB, or a minute of 50 requests a second."""
MAX_KEPT_TRACES = 1000
"""Traces whose spans are still to come when they are chosen."""


class ShareSampler(Sampler):
    """Marks a share of the traces by their ids; records the spans of all, because any may turn out to be worth it."""

    def __init__(self, share: float) -> None:
        self._bound = round(share * (1 << 64))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Follow the parent where there is one."""
        parent = trace.get_current_span(parent_context).get_span_context()
        is_chosen = parent.trace_flags.sampled if parent.is_valid else (trace_id & ((1 << 64) - 1)) < self._bound
        decision = Decision.RECORD_AND_SAMPLE if is_chosen else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, parent.trace_state)

    def get_description(self) -> str:
        """Return the name and the share."""
        return f"ShareSampler{{{self._bound / (1 << 64)}}}"


class KeptTraces(SpanProcessor):
    """Passes chosen spans on to `inner`, and others when their trace turns out to have failed or to be slow."""

    def __init__(self, inner: SpanProcessor, slow_s: float) -> None:
        self._inner = inner
        self._slow_ns = int(slow_s * 1e9)
        self._lock = threading.Lock()  # spans end on the engine's thread as well
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._num_held = 0
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.on_keep: Callable[[int], None] = lambda trace_id: None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass on."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Export, hold, or choose the whole trace because of this span."""
        if (context := span.context) is None or context.trace_flags.sampled:
            self._inner.on_end(span)
            return
        with self._lock:
            is_new = context.trace_id not in self._kept
            if is_new:
                self._hold(context.trace_id, span)
        if not is_new:
            self._inner.on_end(_as_sampled(span, context))
        elif self._is_worth_it(span):
            self.keep(context.trace_id)
            self.on_keep(context.trace_id)

    def keep(self, trace_id: int) -> None:
        """Export what is held of a trace, and what will come."""
        with self._lock:
            self._kept[trace_id] = None
            if len(self._kept) > MAX_KEPT_TRACES:
                self._kept.popitem(last=False)
            spans = self._held.pop(trace_id, [])
            self._num_held -= len(spans)
        for span in spans:
            if span.context is not None:
                self._inner.on_end(_as_sampled(span, span.context))

    def _hold(self, trace_id: int, span: ReadableSpan) -> None:
        self._held.setdefault(trace_id, []).append(span)
        self._num_held += 1
        while self._num_held > MAX_HELD_SPANS:
            self._num_held -= len(self._held.popitem(last=False)[1])

    def _is_worth_it(self, span: ReadableSpan) -> bool:
        took_ns = (span.end_time or 0) - (span.start_time or 0)
        return span.status.status_code is StatusCode.ERROR or took_ns >= self._slow_ns

    def shutdown(self) -> None:
        """Export what was chosen."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what was chosen, now."""
        return bool(self._inner.force_flush(timeout_millis))


def _as_sampled(span: ReadableSpan, context: SpanContext) -> ReadableSpan:
    """Return the span with the flag that exporters look at."""
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        span.name,
        context=SpanContext(context.trace_id, context.span_id, context.is_remote, flags, context.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
