"""OpenTelemetry's finished spans as messages: small, bounded, and free of what a console does not show. Pure."""

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from schemas.telemetry import AttributeValue, FinishedSpan, SpanEvent, SpanKind

MAX_ATTRIBUTE_CHARS = 200
MAX_EVENTS = 64
KINDS: tuple[SpanKind, ...] = ("internal", "server", "client", "producer", "consumer")
"""In the order of OpenTelemetry's numbers."""


def finished_span(span: ReadableSpan) -> FinishedSpan:
    """Return what the bus carries of a span; unvalidated, for it is made by the hundred and of our own values."""
    context, start_ns = span.context, span.start_time or 0
    is_failed = span.status.status_code is StatusCode.ERROR
    return FinishedSpan.model_construct(
        trace_id=f"{context.trace_id:032x}" if context else "",
        span_id=f"{context.span_id:016x}" if context else "",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
        name=span.name,
        kind=KINDS[span.kind.value],
        start_s=start_ns / 1e9,
        duration_s=max(0, (span.end_time or start_ns) - start_ns) / 1e9,
        attributes=_attributes(span.attributes),
        events=_events(span, start_ns) if span.events else (),
        links=tuple(f"{link.context.span_id:016x}" for link in span.links[:MAX_EVENTS]) if span.links else (),
        error=(span.status.description or "error")[:MAX_ATTRIBUTE_CHARS] if is_failed else "",
    )


def _events(span: ReadableSpan, start_ns: int) -> tuple[SpanEvent, ...]:
    return tuple(
        SpanEvent.model_construct(
            name=event.name, offset_s=(event.timestamp - start_ns) / 1e9, attributes=_attributes(event.attributes)
        )
        for event in span.events[:MAX_EVENTS]
    )


def _attributes(attributes: Mapping[str, object] | None) -> dict[str, AttributeValue]:
    return {key: _attribute(value) for key, value in (attributes or {}).items()}


def _attribute(value: object) -> AttributeValue:
    """Lists become text; texts are cut, for clients choose some of them."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(map(str, value))
    return str(value)[:MAX_ATTRIBUTE_CHARS]
