"""What the console remembers of spans is bounded, and found by every name of a request."""

from services.console.trace_ring import MAX_SPANS_PER_TRACE, MAX_UNNAMED_TRACES, TraceRing
from tests.unit.console.console_traffic import batch, of_request, one_request, span


def test_ten_thousand_requests_leave_the_newest_and_nothing_else():
    ring = TraceRing(max_requests=100)
    sizes = []
    for number in range(10_000):
        for one in one_request(number):
            ring.add(one)
        if number % 1000 == 999:
            ring.take_changed(100)
            sizes.append((len(ring), ring.num_spans, len(ring._by_name), len(ring._unnamed)))
    assert sizes == [(100, 700, 200, 0)] * 10
    assert [trace.trace_id for trace in ring.newest(2)] == ["trace-9999", "trace-9998"]
    assert ring.find("req-9899") is None


def test_a_request_is_found_by_its_own_its_answers_and_its_traces_id():
    ring = TraceRing(10)
    for one in one_request(7):
        ring.add(one)
    found = ring.find("req-7")
    assert found is ring.find("chatcmpl-req-7") is ring.find("trace-7")
    assert len(found.spans) == 7
    assert ring.find("req-8") is None


def test_spans_that_come_before_the_one_that_names_their_request_are_kept():
    ring = TraceRing(10)
    ring.add(batch(span("t", "request generate_request")))
    assert len(ring) == 0
    ring.add(batch(span("t", "scheduler.queue", attributes=of_request("req-1"))))
    assert [seen.span.name for seen in ring.find("req-1").spans] == ["request generate_request", "scheduler.queue"]


def test_the_services_own_errands_never_push_requests_out():
    ring = TraceRing(10)
    ring.add(batch(span("mine", "scheduler.queue", attributes=of_request("req-1"))))
    for number in range(3 * MAX_UNNAMED_TRACES):
        ring.add(batch(*(span(f"errand-{number}", "request cache_command", start_s=n) for n in range(50))))
    assert ring.find("req-1") is not None
    assert ring.num_spans < 33 * MAX_UNNAMED_TRACES


def test_a_trace_that_grows_without_end_is_cut_and_says_so():
    ring = TraceRing(10)
    for number in range(1000):
        ring.add(batch(span("t", "scheduler.queue", start_s=number, attributes=of_request(f"req-{number}"))))
    found = ring.find("t")
    assert len(found.spans) == len(found.names) == MAX_SPANS_PER_TRACE
    assert found.num_missing == 600


def test_large_traces_make_room_by_their_spans():
    ring = TraceRing(max_requests=100)
    for number in range(100):
        ring.add(batch(*(span(f"t{number}", "executor.decode", n, attributes=of_request("r")) for n in range(400))))
    assert ring.num_spans <= 100 * 40 + 400
    assert 5 <= len(ring) < 20


def test_only_traces_with_news_are_told_and_only_once():
    ring = TraceRing(10)
    for number in range(3):
        ring.add(batch(span(f"t{number}", "scheduler.queue", attributes=of_request(f"r{number}"))))
    assert [trace.trace_id for trace in ring.take_changed(2)] == ["t2", "t1"]
    assert ring.take_changed(10) == []
    ring.add(batch(span("t0", "executor.prefill")))
    assert [trace.trace_id for trace in ring.take_changed(10)] == ["t0"]


def test_what_instances_could_not_send_is_summed_over_them():
    ring = TraceRing(10)
    for dropped in (3, 5):
        ring.add(batch(num_dropped=dropped))
    ring.add(batch(instance="executor-0", role="executor", num_dropped=2))
    assert ring.num_dropped == 7
