"""What a trace's spans are shown as."""

import pytest

from schemas.telemetry import SpanEvent
from services.console.trace_ring import TraceRing
from services.console.waterfall import request_line, waterfall
from tests.unit.console.console_traffic import batch, of_request, one_request, span


def trace_of(*batches):
    ring = TraceRing(10)
    for one in batches:
        ring.add(one)
    return next(ring.newest(1))


def test_rows_are_a_tree_in_order_of_time():
    reply = waterfall(trace_of(*one_request(1)), "req-1")
    assert [(row.depth, row.name) for row in reply.rows] == [
        (0, "POST /v1/chat/completions"),
        (1, "publish work_item"),
        (2, "scheduler.queue"),
        (2, "scheduler.admit"),
        (2, "executor.prefill"),
        (2, "executor.decode"),
        (2, "tokenizer.detokenize"),
    ]
    assert reply.duration_s == pytest.approx(0.12)
    assert reply.rows[2].offset_s == pytest.approx(0.003)
    assert reply.request_ids == ("chatcmpl-req-1", "req-1")


def test_a_request_has_one_name_in_whatever_order_its_spans_come():
    for order in (1, -1):
        trace = trace_of(*one_request(1)[::order])
        assert waterfall(trace, "req-1").request_ids == ("chatcmpl-req-1", "req-1")
        assert request_line(trace).request_id == "chatcmpl-req-1"


def test_a_plain_request_was_queued_cached_prefilled_decoded_and_ended():
    reply = waterfall(trace_of(*one_request(1)), "req-1")
    assert [(decision.kind, decision.text) for decision in reply.decisions] == [
        ("queued", "admitted by scheduler-0 after 2.0 ms"),
        ("cached", "16 tokens were cached"),
        ("prefilled", "computed the prompt: 40 tokens in 10.0 ms (4000/s) on executor-0"),
        ("decoded", "decoded 20 tokens in 100.0 ms (200/s) on executor-0"),
        ("ended", "output complete: 20 tokens stored by tokenizer-0"),
    ]


def setback(name, **attributes):
    return SpanEvent(
        name=f"natterjack.{name}", offset_s=0.0, attributes={f"natterjack.{k}": attributes[k] for k in attributes}
    )


def test_setbacks_another_executor_and_other_owners_are_told():
    request = of_request("req-1")
    waits = [
        span("trace-1", "scheduler.queue", 100.2 + number, 0.05, attributes=request, events=(event,))
        for number, event in enumerate(
            (
                setback("preempted", executor="executor-0", num_tokens_kept=7),
                setback("executor_lost", executor="executor-0", num_tokens_kept=9),
                setback("taken_over", epoch=3, num_tokens_kept=9),
            )
        )
    ]
    trace = trace_of(
        *one_request(1)[:3],
        batch(*waits, instance="s-0", role="scheduler"),
        batch(span("trace-1", "executor.prefill", 103.0, attributes=request), instance="executor-1", role="executor"),
        batch(
            span("trace-1", "tokenizer.detokenize", 103.0, 0.1, attributes={"natterjack.epoch": 3}),
            instance="tokenizer-1",
            role="tokenizer",
        ),
    )
    decisions = [(d.kind, d.text) for d in waterfall(trace, "req-1").decisions]
    assert [text for kind, text in decisions if kind in ("preempted", "moved", "taken_over")] == [
        "preempted on executor-0 after 7 tokens: others needed its blocks",
        "thrown back after 9 tokens: executor-0 died or lost a step",
        "taken over by s-0, with 9 tokens of its output",
        "moved from executor-0 to executor-1",
        "output taken over by tokenizer-1 (epoch 3)",
    ]
    assert ("queued", "admitted again by s-0 after 50.0 ms") in decisions
    assert request_line(trace).num_restarts == 3


def test_a_wait_that_an_error_ended_is_no_admission():
    failed = span("t", "scheduler.queue", attributes=of_request("r") | {"error.type": "deadline_exceeded"})
    assert waterfall(trace_of(batch(failed, instance="s", role="scheduler")), "r").decisions == ()


def test_choices_are_told_apart_when_there_are_several():
    spans = [span("t", "scheduler.queue", attributes=of_request("r", choice)) for choice in (0, 1)]
    reply = waterfall(trace_of(batch(*spans, instance="s", role="scheduler")), "r")
    assert [decision.text for decision in reply.decisions] == [
        "choice 0: admitted by s after 10.0 ms",
        "choice 1: admitted by s after 10.0 ms",
    ]


def test_a_failure_names_where_and_why():
    failed = span("t", "process generate_request", error="queue_full", attributes=of_request("r"))
    reply = waterfall(trace_of(batch(failed, instance="tokenizer-0", role="tokenizer")), "r")
    assert reply.error == "queue_full"
    assert reply.decisions[-1].text == "process generate_request at tokenizer-0 failed: queue_full"


def test_spans_without_their_parents_and_circles_are_all_shown():
    spans = [
        span("t", "orphan", span_id="a", parent_id="unknown", attributes=of_request("r")),
        span("t", "own parent", span_id="b", parent_id="b"),
        span("t", "child", 101.0, span_id="c", parent_id="a"),
    ]
    rows = waterfall(trace_of(batch(*spans)), "r").rows
    assert [(row.name, row.depth) for row in rows] == [("orphan", 0), ("child", 1), ("own parent", 0)]


def test_nothing_known_is_a_reply_without_rows():
    reply = waterfall(None, "req-1")
    assert (reply.request, reply.rows) == ("req-1", ())


def test_the_list_shows_a_request_as_far_as_it_has_come():
    batches = one_request(1)
    early = request_line(trace_of(*batches[:2]))
    assert (early.outcome, early.door, early.output_tokens, early.duration_s) == ("open", "NATS", None, None)
    assert (early.queue_s, early.cached_tokens) == (pytest.approx(0.002), 16)
    line = request_line(trace_of(*batches))
    assert (line.request_id, line.outcome, line.model) == ("chatcmpl-req-1", "done", "smol")
    assert line.door == "POST /v1/chat/completions"
    assert (line.prompt_tokens, line.output_tokens, line.executor) == (40, 20, "executor-0")
    assert line.first_token_s == pytest.approx(0.016)
    assert line.as_json()["num_restarts"] == 0


def test_a_failed_request_shows_its_code_as_the_outcome():
    failed = span("t", "tokenizer.detokenize", error="cancelled", attributes=of_request("r"))
    assert request_line(trace_of(batch(failed))).outcome == "cancelled"
