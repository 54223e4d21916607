"""The latest requests' spans, by trace: bounded, whatever comes.

Owns what was received; waterfall.py knows what it means. Spans of what is no request (the services' own errands) are
kept apart and for a short time, for a span that names its request may be the last of its trace to come.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from schemas.control import Role
from schemas.telemetry import FinishedSpan, SpanBatch

REQUEST_ID = "natterjack.request_id"
ANSWER_ID = "gen_ai.response.id"
MAX_SPANS_PER_TRACE = 400
MAX_UNNAMED_TRACES = 512
MAX_SPANS_PER_UNNAMED_TRACE = 32
MEAN_SPANS_PER_TRACE = 40
"""Together, the traces hold so many spans at most: large ones make room sooner. A plain request has about 12."""


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span and where it ended."""

    span: FinishedSpan
    instance: str
    role: Role


@dataclass(slots=True)
class Trace:
    """What has come of one trace; `names` are the ids of its requests and answers, in the order of their coming."""

    trace_id: str
    spans: list[SeenSpan] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    num_missing: int = 0


class TraceRing:
    """The last `max_requests` traces that serve requests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._max_spans = max_requests * MEAN_SPANS_PER_TRACE + MAX_SPANS_PER_TRACE
        self._num_request_spans = 0
        self._requests: OrderedDict[str, Trace] = OrderedDict()
        self._unnamed: OrderedDict[str, Trace] = OrderedDict()
        self._by_name: dict[str, str] = {}
        self._changed: dict[str, None] = {}
        self._dropped: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_spans(self) -> int:
        """Spans that are held."""
        return sum(len(trace.spans) for held in (self._requests, self._unnamed) for trace in held.values())

    @property
    def num_dropped(self) -> int:
        """Spans that their instances could not send."""
        return sum(self._dropped.values())

    def add(self, batch: SpanBatch) -> None:
        """Take in a batch; the oldest traces make room."""
        self._dropped[batch.instance] = batch.num_dropped
        while len(self._dropped) > MAX_UNNAMED_TRACES:
            self._dropped.pop(next(iter(self._dropped)))
        for span in batch.spans:
            trace = self._trace_of(span)
            self._changed[span.trace_id] = None
            if len(trace.spans) >= (MAX_SPANS_PER_TRACE if trace.names else MAX_SPANS_PER_UNNAMED_TRACE):
                trace.num_missing += 1
                continue
            trace.spans.append(SeenSpan(span, batch.instance, batch.role))
            self._num_request_spans += bool(trace.names)
            self._make_room()

    def _trace_of(self, span: FinishedSpan) -> Trace:
        trace = self._requests.get(span.trace_id)
        names = list(_names(span))
        if trace is None and names:
            trace = self._unnamed.pop(span.trace_id, None) or Trace(span.trace_id)
            self._requests[span.trace_id] = trace
            self._num_request_spans += len(trace.spans)
        if trace is None:
            trace = self._unnamed.setdefault(span.trace_id, Trace(span.trace_id))
            if len(self._unnamed) > MAX_UNNAMED_TRACES:
                self._unnamed.popitem(last=False)
        for name in names:
            if len(trace.names) < MAX_SPANS_PER_TRACE:
                trace.names[name] = None
                self._by_name[name] = span.trace_id
        return trace

    def _make_room(self) -> None:
        while len(self._requests) > self._max_requests or self._num_request_spans > self._max_spans:
            trace_id, trace = self._requests.popitem(last=False)
            self._num_request_spans -= len(trace.spans)
            for name in trace.names:
                if self._by_name.get(name) == trace_id:
                    del self._by_name[name]

    def find(self, name: str) -> Trace | None:
        """Return the trace of a request's id, an answer's id or a trace's id."""
        return self._requests.get(self._by_name.get(name, name))

    def newest(self, limit: int) -> Iterator[Trace]:
        """Yield the latest requests' traces, newest first."""
        for number, trace in enumerate(reversed(self._requests.values())):
            if number >= limit:
                return
            yield trace

    def take_changed(self, limit: int) -> list[Trace]:
        """Return the traces that got spans since the last call, if they are among the newest; newest first."""
        changed, self._changed = self._changed, {}
        return [trace for trace in self.newest(limit) if trace.trace_id in changed]


def _names(span: FinishedSpan) -> Iterable[str]:
    for key in (REQUEST_ID, ANSWER_ID):
        name = span.attributes.get(key)
        if isinstance(name, str) and name:
            yield name
