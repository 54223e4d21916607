"""What instances tell of themselves for people to look at, and what a console makes of it: a request's waterfall.

All of it may be lost without harm, and none of it holds a prompt or an answer. `…_s` are Unix seconds; `offset_s` are
seconds after the beginning of the trace, in an event: of its span.
"""

from typing import ClassVar, Literal

from schemas.codec import Message, Part
from schemas.control import Role

TRACE_SHARE = "trace_share"
"""In the `load` of a console's registration: the part of all traces, chosen by their ids, that it wants to hear of."""

AttributeValue = str | int | float | bool
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]


class SpanEvent(Part):
    """Something that happened at one moment of a span."""

    name: str
    offset_s: float
    attributes: dict[str, AttributeValue] = {}


class FinishedSpan(Part):
    """One span of OpenTelemetry, ended; ids in hexadecimal digits.

    `error` is why it failed, a code rather than a text. `links` are ids of spans of other traces.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    kind: SpanKind = "internal"
    start_s: float
    duration_s: float
    attributes: dict[str, AttributeValue] = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[str, ...] = ()
    error: str = ""


class SpanBatch(Message):
    """Spans that ended at one instance; `num_dropped` counts those that it did not send, since its start."""

    SCHEMA: ClassVar[str] = "span_batch"

    instance: str
    role: Role
    spans: tuple[FinishedSpan, ...]
    num_dropped: int = 0


class SampledValue(Part):
    """A counter or a gauge at one moment, under its labels."""

    name: str
    labels: dict[str, str] = {}
    value: float


class SampledHistogram(Part):
    """A histogram at one moment, since its process's start; `counts` has one more entry than `bounds`."""

    name: str
    labels: dict[str, str] = {}
    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class MetricSample(Message):
    """Those of an instance's metrics that a person watches, every second; another incarnation counts from zero."""

    SCHEMA: ClassVar[str] = "metric_sample"

    instance: str
    incarnation: str
    role: Role
    time_s: float
    values: tuple[SampledValue, ...] = ()
    histograms: tuple[SampledHistogram, ...] = ()


class TraceQuery(Message):
    """Asks a console for a request by its id, an answer's id (`chatcmpl-…`), or the id of its trace."""

    SCHEMA: ClassVar[str] = "trace_query"

    request: str


class WaterfallRow(Part):
    """One span of the waterfall: `depth` below the trace's first span, `offset_s` after its beginning."""

    span_id: str
    depth: int = 0
    name: str
    instance: str
    role: Role
    offset_s: float
    duration_s: float
    attributes: dict[str, AttributeValue] = {}
    events: tuple[SpanEvent, ...] = ()
    error: str = ""


class TraceDecision(Part):
    """One thing that the pipeline decided about a request, in words for a person."""

    kind: Literal["queued", "cached", "prefilled", "decoded", "preempted", "moved", "taken_over", "failed", "ended"]
    offset_s: float
    text: str


class TraceReply(Message):
    """A request's trace as far as its spans have come, in the order of a waterfall; no rows: nothing is known of it.

    `request_ids`: the ids of its answers first, then those of the requests themselves.
    """

    SCHEMA: ClassVar[str] = "trace_reply"

    request: str
    trace_id: str = ""
    request_ids: tuple[str, ...] = ()
    started_s: float = 0.0
    duration_s: float = 0.0
    error: str = ""
    rows: tuple[WaterfallRow, ...] = ()
    decisions: tuple[TraceDecision, ...] = ()
    num_missing: int = 0
