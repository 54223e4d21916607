"""What a trace's spans mean: the waterfall's order, a line for the list of requests, and what was decided. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from schemas.telemetry import AttributeValue, SpanEvent, TraceDecision, TraceReply, WaterfallRow
from services.console.trace_ring import ANSWER_ID, REQUEST_ID, SeenSpan, Trace

CHOICE = "natterjack.choice"
EPOCH = "natterjack.epoch"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
SETBACKS = frozenset({"natterjack.preempted", "natterjack.executor_lost"})
ENDS = frozenset({"tokenizer.detokenize"})
"""Spans whose end is the end of their request."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request in a list; None where nothing has come yet. `outcome`: open, done, or the code of an error."""

    trace_id: str
    request_id: str
    door: str
    model: str
    started_s: float
    duration_s: float | None
    outcome: str
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    queue_s: float | None
    first_token_s: float | None
    executor: str
    num_restarts: int

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


def waterfall(trace: Trace | None, request: str) -> TraceReply:
    """Return a trace's spans as a tree in order of time, with decisions; without a trace, a reply that has no rows."""
    if trace is None or not trace.spans:
        return TraceReply(request=request)
    started_s, ended_s = _extent(trace.spans)
    return TraceReply(
        request=request,
        trace_id=trace.trace_id,
        request_ids=tuple(_request_ids(trace)),
        started_s=started_s,
        duration_s=ended_s - started_s,
        error=_error(trace.spans),
        rows=tuple(_rows(trace.spans, started_s)),
        decisions=tuple(sorted(_decisions(trace.spans, started_s), key=lambda decision: decision.offset_s)),
        num_missing=trace.num_missing,
    )


def _extent(spans: Sequence[SeenSpan]) -> tuple[float, float]:
    return min(s.span.start_s for s in spans), max(s.span.start_s + s.span.duration_s for s in spans)


def _error(spans: Iterable[SeenSpan]) -> str:
    return next((seen.span.error for seen in spans if seen.span.error), "")


def _rows(spans: Sequence[SeenSpan], started_s: float) -> Iterator[WaterfallRow]:
    """Depth first, siblings by time. A span whose parent has not come, or is the client's own, begins a tree."""
    known = {seen.span.span_id for seen in spans}
    children: dict[str, list[SeenSpan]] = {}
    for seen in sorted(spans, key=lambda seen: (seen.span.start_s, -seen.span.duration_s)):
        parent = seen.span.parent_id
        children.setdefault(parent if parent in known and parent != seen.span.span_id else "", []).append(seen)
    waiting = [(seen, 0) for seen in reversed(children.get("", []))]
    while waiting:
        seen, depth = waiting.pop()
        yield _row(seen, depth, started_s)
        waiting += [(child, depth + 1) for child in reversed(children.pop(seen.span.span_id, []))]


def _row(seen: SeenSpan, depth: int, started_s: float) -> WaterfallRow:
    span = seen.span
    return WaterfallRow(
        span_id=span.span_id,
        depth=depth,
        name=span.name,
        instance=seen.instance,
        role=seen.role,
        offset_s=span.start_s - started_s,
        duration_s=span.duration_s,
        attributes=span.attributes,
        events=span.events,
        error=span.error,
    )


# ---- decisions


def _decisions(spans: Sequence[SeenSpan], started_s: float) -> Iterator[TraceDecision]:
    by_end = sorted(spans, key=lambda seen: seen.span.start_s + seen.span.duration_s)
    has_choices = len({_place(seen) for seen in spans if CHOICE in seen.span.attributes}) > 1
    yield from _admissions(by_end, started_s, has_choices)
    yield from _computations(by_end, started_s, has_choices)
    for seen in by_end:
        yield from _of_span(seen, started_s)


def _admissions(spans: Iterable[SeenSpan], started_s: float, has_choices: bool) -> Iterator[TraceDecision]:
    """What a wait began with, how it ended, and what the admission after it found."""
    for seen in spans:
        span = seen.span
        which = f"choice {_place(seen)[1]}: " if has_choices else ""
        at_s = span.start_s + span.duration_s - started_s
        if span.name == "scheduler.queue":
            told = [decision for event in span.events if (decision := _setback(seen, event, which, started_s))]
            yield from told
            if not span.attributes.get("error.type"):
                again = " again" if told else ""
                text = f"{which}admitted{again} by {seen.instance} after {_time(span.duration_s)}"
                yield TraceDecision(kind="queued", offset_s=at_s, text=text)
        elif span.name == "scheduler.admit":
            cached = _number(span.attributes.get(CACHED_TOKENS))
            found = f"{cached} tokens were cached" if cached else "nothing of the prompt was cached"
            yield TraceDecision(kind="cached", offset_s=at_s, text=which + found)


def _setback(seen: SeenSpan, event: SpanEvent, which: str, started_s: float) -> TraceDecision | None:
    """What made a choice wait again; None for other events."""
    num_kept = _number(event.attributes.get("natterjack.num_tokens_kept")) or 0
    executor, at_s = event.attributes.get("natterjack.executor", ""), seen.span.start_s + event.offset_s - started_s
    match event.name:
        case "natterjack.preempted":
            text = f"{which}preempted on {executor} after {num_kept} tokens: others needed its blocks"
            return TraceDecision(kind="preempted", offset_s=at_s, text=text)
        case "natterjack.executor_lost":
            text = f"{which}thrown back after {num_kept} tokens: {executor} died or lost a step"
            return TraceDecision(kind="preempted", offset_s=at_s, text=text)
        case "natterjack.taken_over":
            text = f"{which}taken over by {seen.instance}, with {num_kept} tokens of its output"
            return TraceDecision(kind="taken_over", offset_s=at_s, text=text)
    return None


def _computations(spans: Iterable[SeenSpan], started_s: float, has_choices: bool) -> Iterator[TraceDecision]:
    last: dict[tuple[str, int], str] = {}
    for seen in spans:
        span = seen.span
        if span.name not in ("executor.prefill", "executor.decode"):
            continue
        place = _place(seen)
        which = f"choice {place[1]}: " if has_choices else ""
        if last.get(place, seen.instance) != seen.instance:
            text = f"{which}moved from {last[place]} to {seen.instance}"
            yield TraceDecision(kind="moved", offset_s=span.start_s - started_s, text=text)
        last[place] = seen.instance
        is_prefill = span.name == "executor.prefill"
        num_tokens = _number(span.attributes.get(INPUT_TOKENS if is_prefill else OUTPUT_TOKENS))
        counted = f" {num_tokens} tokens" if num_tokens is not None else ""
        pace = f" ({num_tokens / span.duration_s:.0f}/s)" if num_tokens and span.duration_s > 0 else ""
        verb = "computed the prompt:" if is_prefill else "decoded"
        yield TraceDecision(
            kind="prefilled" if is_prefill else "decoded",
            offset_s=span.start_s + span.duration_s - started_s,
            text=f"{which}{verb}{counted} in {_time(span.duration_s)}{pace} on {seen.instance}",
        )


def _of_span(seen: SeenSpan, started_s: float) -> Iterator[TraceDecision]:
    span, epoch = seen.span, _number(seen.span.attributes.get(EPOCH))
    ended_s = span.start_s + span.duration_s - started_s
    if span.name in ENDS:
        if epoch is not None and epoch > 1:
            text = f"output taken over by {seen.instance} (epoch {epoch})"
            yield TraceDecision(kind="taken_over", offset_s=span.start_s - started_s, text=text)
        num_tokens = _number(span.attributes.get(OUTPUT_TOKENS))
        if num_tokens is not None:
            text = f"output complete: {num_tokens} tokens stored by {seen.instance}"
            yield TraceDecision(kind="ended", offset_s=ended_s, text=text)
    if span.error:
        yield TraceDecision(
            kind="failed", offset_s=ended_s, text=f"{span.name} at {seen.instance} failed: {span.error}"
        )


# ---- one line for the list


def request_line(trace: Trace) -> RequestLine:
    """Return what a list of requests shows of a trace."""
    spans = trace.spans
    started_s, ended_s = _extent(spans)
    queue = _first(spans, "scheduler.queue")
    prefill = _first(spans, "executor.prefill")
    executors = dict.fromkeys(seen.instance for seen in spans if seen.role == "executor")
    error = _error(spans)
    is_over = bool(error) or any(seen.span.name in ENDS or seen.span.kind == "server" for seen in spans)
    return RequestLine(
        trace_id=trace.trace_id,
        request_id=next(iter(_request_ids(trace)), trace.trace_id),
        door=_door(spans),
        model=_text(spans, "gen_ai.request.model"),
        started_s=started_s,
        duration_s=ended_s - started_s if is_over else None,
        outcome=error or ("done" if is_over else "open"),
        prompt_tokens=_largest(spans, INPUT_TOKENS),
        output_tokens=_largest(spans, OUTPUT_TOKENS),
        cached_tokens=_largest(spans, CACHED_TOKENS),
        queue_s=queue.span.duration_s if queue else None,
        first_token_s=prefill.span.start_s + prefill.span.duration_s - started_s if prefill else None,
        executor=", ".join(executors),
        num_restarts=sum(map(_is_restart, spans)),
    )


def _is_restart(seen: SeenSpan) -> bool:
    """Tell whether a choice had to start again with this span, or the output had another writer before."""
    if seen.span.name in ENDS:
        return (_number(seen.span.attributes.get(EPOCH)) or 0) > 1
    return any(event.name in SETBACKS for event in seen.span.events)


def _request_ids(trace: Trace) -> list[str]:
    """Answers first: their ids are what clients know; over NATS a request has only its own. Spans come in any order."""
    answers = (seen.span.attributes.get(ANSWER_ID) for seen in trace.spans)
    return list(dict.fromkeys([*(str(name) for name in answers if name), *trace.names]))


def _door(spans: Iterable[SeenSpan]) -> str:
    """How the request came in: the route of its HTTP exchange, once that has ended, else NATS."""
    route = next((seen.span.name for seen in spans if seen.span.kind == "server"), "")
    return route or ("HTTP" if any(seen.role == "gateway" for seen in spans) else "NATS")


def _first(spans: Iterable[SeenSpan], name: str) -> SeenSpan | None:
    return min((seen for seen in spans if seen.span.name == name), key=lambda seen: seen.span.start_s, default=None)


def _text(spans: Iterable[SeenSpan], key: str) -> str:
    return next((str(seen.span.attributes[key]) for seen in spans if key in seen.span.attributes), "")


def _largest(spans: Iterable[SeenSpan], key: str) -> int | None:
    numbers = (_number(seen.span.attributes.get(key)) for seen in spans)
    return max((number for number in numbers if number is not None), default=None)


def _place(seen: SeenSpan) -> tuple[str, int]:
    attributes = seen.span.attributes
    return str(attributes.get(REQUEST_ID, "")), _number(attributes.get(CHOICE)) or 0


def _number(value: AttributeValue | None) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
