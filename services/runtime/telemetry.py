"""Traces: set up once per process together with its logs, used around messages and steps only.

One request is one trace: its context travels as `traceparent` in message headers (and, where one message serves many
requests, in the message's parts). Spans are exported by OTLP/HTTP when an endpoint is configured; their ids are made
either way, so that logs always carry the trace id. Prompt and output text never enter spans or logs.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from schemas.errors import NatterjackError
from services.runtime.logs import setup_logs
from services.runtime.settings import TelemetrySettings
from services.runtime.trace_sampling import KeptTraces, ShareSampler

TRACE_HEADER = "traceparent"
EXPORT_TIMEOUT_S = 5
EXPORT_PERIOD_MS = 2000
"""A message to the collector costs as much as many spans."""
SCOPE = "natterjack"

_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""What our own processes and nearly all clients send; the propagator, five times as slow, reads the rest."""
_propagator = TraceContextTextMapPropagator()
_NOTHING = otel_context.Context()

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """The process's tracer; built by `setup_telemetry` and closed by the service's lifecycle."""

    def __init__(self, provider: TracerProvider, kept: KeptTraces | None = None) -> None:
        self._provider = provider
        self._kept = kept
        self._tracer = provider.get_tracer(SCOPE)
        self._scope = InstrumentationScope(SCOPE, "")

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | None = None,
        attributes: Attributes | None = None,
    ) -> Iterator[Span]:
        """Run the block in a span; `parent` is a traceparent, else the current context is used."""
        context = context_of(parent)
        span = self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)
        token = otel_context.attach(trace.set_span_in_context(span, context))
        try:
            yield span
        except Exception as error:  # its text may hold a prompt
            reason = error.code if isinstance(error, NatterjackError) else type(error).__name__
            span.set_status(Status(StatusCode.ERROR, reason))
            span.set_attribute("error.type", reason)
            raise
        finally:
            otel_context.detach(token)
            span.end()

    def start(
        self,
        name: str,
        *,
        parent: str | None = None,
        start_s: float | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Start a span that some other callback will end; times are Unix seconds."""
        return self._tracer.start_span(
            name,
            context=context_of(parent),
            start_time=None if start_s is None else int(start_s * 1e9),
            attributes=attributes,
            links=links,
        )

    def record(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        end_s: float | None = None,
        attributes: Attributes,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
    ) -> None:
        """Record a span that began at `start_s` (Unix time) and ends at `end_s`, or now; its `parent` is elsewhere.

        Nothing of it can change any more, which saves most of what a span costs. `attributes` are the span's from now
        on, and its `events` are made by `event`.
        """
        parent_context = span_context_of(parent)
        if parent_context is None or not isinstance(self._tracer, Tracer):
            span = self.start(name, parent=parent, start_s=start_s, attributes=attributes, links=links)
            for one in events:
                span.add_event(one.name, one.attributes, one.timestamp)
            span.end(None if end_s is None else int(end_s * 1e9))
            return
        own_context = SpanContext(
            parent_context.trace_id,
            self._tracer.id_generator.generate_span_id(),
            is_remote=False,
            trace_flags=parent_context.trace_flags,
            trace_state=parent_context.trace_state,
        )
        finished = ReadableSpan(
            name,
            own_context,
            parent_context,
            self._tracer.resource,
            attributes,
            events,
            links,
            start_time=int(start_s * 1e9),
            end_time=time.time_ns() if end_s is None else int(end_s * 1e9),
            instrumentation_scope=self._scope,
        )
        self._tracer.span_processor.on_end(finished)

    def add_processor(self, processor: SpanProcessor) -> None:
        """Show `processor` every span from now on, whether it is exported or not."""
        self._provider.add_span_processor(processor)

    def tell_kept(self, on_keep: Callable[[int], None]) -> bool:
        """Call `on_keep` with the id of every trace that this process chooses; False when there is nothing to choose.

        It is called on whichever thread the span ended on.
        """
        if self._kept is None:
            return False
        self._kept.on_keep = on_keep
        return True

    def keep(self, trace_id: int) -> None:
        """Export a trace that another process chose."""
        if self._kept is not None:
            self._kept.keep(trace_id)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


def setup_telemetry(
    settings: TelemetrySettings, *, service: str, instance: str, exporter: SpanExporter | None = None
) -> Tracing:
    """Configure this process's logs and return its tracer; `exporter` overrides the configured one in tests."""
    setup_logs(settings, instance)
    provider = TracerProvider(sampler=ShareSampler(settings.trace_share), resource=resource_of(service, instance))
    if exporter is None and settings.otlp_endpoint:
        exporter = _otlp_exporter(settings.otlp_endpoint)
    if exporter is None:
        return Tracing(provider)
    exporting = BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_PERIOD_MS)
    kept = KeptTraces(exporting, settings.trace_slow_s)
    provider.add_span_processor(kept)
    return Tracing(provider, kept if settings.trace_share < 1 else None)


class _ProcessResource(Resource):
    """A resource of which a process has one: exporters ask for its hash at every span, and the text is long."""

    def __hash__(self) -> int:
        return hash(self.attributes.get("service.instance.id"))

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


def resource_of(service: str, instance: str) -> Resource:
    """Return what OpenTelemetry says of this process, with its spans and its metrics."""
    resource = Resource.create(
        {
            "service.name": f"natterjack-{service}",
            "service.namespace": "natterjack",
            "service.instance.id": instance,
        }
    )
    return _ProcessResource(resource.attributes, resource.schema_url)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # only when it is wanted

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)


def context_of(traceparent: str | None) -> otel_context.Context | None:
    """Return the context that a traceparent names; None (the current one) without it."""
    if traceparent is None:
        return None
    context = span_context_of(traceparent)
    return trace.set_span_in_context(NonRecordingSpan(context), _NOTHING) if context is not None else _NOTHING


def span_context_of(traceparent: str) -> SpanContext | None:
    """Return the span that a traceparent names, None when it names none."""
    if (match := _TRACEPARENT.fullmatch(traceparent)) is not None:
        trace_id, span_id, flags = match.groups()
        context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    else:
        extracted = _propagator.extract({TRACE_HEADER: traceparent}, context=_NOTHING)
        context = trace.get_current_span(extracted).get_span_context()
    return context if context.is_valid else None


def event(name: str, at_s: float, attributes: Attributes) -> Event:
    """Return something that happened within a span, at a Unix time."""
    return Event(name, attributes, int(at_s * 1e9))


def link_to(traceparent: str) -> Link | None:
    """Return the link to the span that a traceparent names, None when it names none."""
    context = span_context_of(traceparent)
    return None if context is None else Link(context)


def current_trace_id() -> str:
    """Return the id of the current trace if it is exported anyway; empty otherwise."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


def current_traceparent() -> str | None:
    """Return the traceparent of the current span, None outside of any."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
