"""A sequence's waits and admissions as spans: each once, in order, with what made it wait again as an event."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.runtime.telemetry import Tracing
from services.scheduler.request_spans import RequestSpans
from services.scheduler.requests import DurableChoice, Sequence, new_request
from tests.unit.scheduler.scheduling_traffic import work

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CACHED = "gen_ai.usage.cache_read.input_tokens"


@pytest.fixture
def spans(tracing: Tracing) -> RequestSpans:
    return RequestSpans(tracing)


def sequence(epoch: int = 1, num_durable: int = 0, traceparent: str | None = TRACEPARENT) -> Sequence:
    durable = (DurableChoice(token_ids=(5,) * num_durable),)
    request = new_request(work(), None, now_s=100.0, epoch=epoch, traceparent=traceparent, durable=durable)
    return request.sequences[0]


def told(exporter: InMemorySpanExporter) -> list[tuple[str, float, float]]:
    return [(s.name, (s.start_time or 0) / 1e9, (s.end_time or 0) / 1e9) for s in exporter.get_finished_spans()]


def events(exporter: InMemorySpanExporter) -> list[tuple[str, dict[str, object]]]:
    finished: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
    return [(event.name, dict(event.attributes or {})) for span in finished for event in span.events]


def test_a_wait_ends_where_the_admission_begins(spans: RequestSpans, span_exporter: InMemorySpanExporter) -> None:
    one = sequence()
    one.num_cached = 32
    spans.admitted("executor-0", [one], asked_s=101.0, now_s=101.5)
    assert told(span_exporter) == [("scheduler.queue", 100.0, 101.0), ("scheduler.admit", 101.0, 101.5)]
    queue, admit = span_exporter.get_finished_spans()
    assert dict(admit.attributes or {}) == {
        "natterjack.request_id": one.request.work.request_id,
        "natterjack.choice": 0,
        "natterjack.executor": "executor-0",
        CACHED: 32,
    }
    assert CACHED not in dict(queue.attributes or {})
    for span in (queue, admit):
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert events(span_exporter) == []


@pytest.mark.parametrize(("was_lost", "name"), [(False, "natterjack.preempted"), (True, "natterjack.executor_lost")])
def test_a_setback_is_an_event_at_the_beginning_of_the_next_wait(
    spans: RequestSpans, span_exporter: InMemorySpanExporter, was_lost: bool, name: str
) -> None:
    one = sequence()
    spans.admitted("executor-0", [one], 101.0, 101.5)
    one.is_admitted = True
    one.tokens += [7, 8]
    spans.returned("executor-0", [one], was_lost, 105.0)
    one.is_admitted = False
    spans.returned("executor-1", [one], False, 106.0)  # only refused
    spans.admitted("executor-1", [one], 107.0, 107.5)
    assert told(span_exporter)[2:] == [("scheduler.queue", 105.0, 107.0), ("scheduler.admit", 107.0, 107.5)]
    known = {"natterjack.executor": "executor-0", "natterjack.num_tokens_kept": 2}
    assert events(span_exporter) == [(name, known)]


def test_a_request_of_another_scheduler_says_so(spans: RequestSpans, span_exporter: InMemorySpanExporter) -> None:
    spans.admitted("executor-0", [sequence(epoch=4, num_durable=3)], 101.0, 101.5)
    known = {"natterjack.epoch": 4, "natterjack.num_tokens_kept": 3}
    assert events(span_exporter) == [("natterjack.taken_over", known)]


def test_an_error_ends_a_wait_but_not_a_run(spans: RequestSpans, span_exporter: InMemorySpanExporter) -> None:
    waiting, running = sequence(), sequence()
    running.status = "running"
    for one in (waiting, running):
        spans.ended(one, "deadline_exceeded", 102.0)
    assert told(span_exporter) == [("scheduler.queue", 100.0, 102.0)]
    assert dict(span_exporter.get_finished_spans()[0].attributes or {})["error.type"] == "deadline_exceeded"


def test_a_request_without_a_trace_has_no_spans(spans: RequestSpans, span_exporter: InMemorySpanExporter) -> None:
    one = sequence(traceparent=None)
    spans.admitted("executor-0", [one], 101.0, 101.5)
    spans.ended(one, "cancelled", 102.0)
    assert told(span_exporter) == []
