"""A trace and a deployment as the terminal shows them."""

import io

import pytest
from rich.console import Console

from schemas.telemetry import WaterfallRow
from services.cli.top_view import top_view
from services.cli.trace_view import span_bar, span_time, trace_view
from services.console.overview import overview
from services.console.samples import Samples
from services.console.trace_ring import TraceRing
from services.console.waterfall import waterfall
from tests.unit.console.console_traffic import batch, of_request, one_request, registration, sample, span
from tests.unit.console.test_overview import everyone


def printed(view, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def reply_of(*batches):
    ring = TraceRing(10)
    for one in batches:
        ring.add(one)
    return waterfall(next(ring.newest(1)), "req-1")


def row(offset_s, duration_s):
    return WaterfallRow(span_id="a", name="n", instance="i", role="executor", offset_s=offset_s, duration_s=duration_s)


@pytest.mark.parametrize(
    ("offset_s", "duration_s", "bar"),
    [
        (0.0, 1.0, "████████"),
        (0.5, 0.5, "    ████"),
        (0.25, 0.0, "  ▏     "),
        (0.999, 0.001, "       █"),
        (1.0, 0.0, "       █"),
        (0.0, 0.19, "█▌      "),
        (-1.0, 9.0, "████████"),
    ],
)
def test_a_bar_begins_and_ends_where_its_span_does(offset_s, duration_s, bar):
    assert span_bar(row(offset_s, duration_s), 1.0, 8) == bar


def test_a_trace_without_any_length_has_bars_as_well():
    assert span_bar(row(0.0, 0.0), 0.0, 4) == "▏   "


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.000045, "45 µs")])
def test_times_are_in_units_for_people(seconds, text):
    assert span_time(seconds) == text


def test_the_waterfall_shows_ids_decisions_and_every_span_on_a_line():
    text = printed(trace_view(reply_of(*one_request(1)), 120))
    assert "chatcmpl-req-1, req-1" in text
    assert "admitted by scheduler-0 after 2.0 ms" in text
    (line,) = [line for line in text.splitlines() if "executor.decode" in line]
    assert "executor-0" in line
    assert line.rstrip().endswith("100.0 ms")
    assert max(map(len, text.splitlines())) <= 120


def test_failures_and_missing_spans_are_told():
    spans = [span("t", "process x", start_s=n, error="queue_full", attributes=of_request("r")) for n in range(500)]
    text = printed(trace_view(reply_of(batch(*spans)), 100))
    assert "failed: queue_full" in text
    assert "100 more spans were not kept" in text


def test_top_shows_services_latencies_and_executors():
    samples = Samples()
    for second in (0, 1):
        histograms = {"time_to_first_token_seconds": (0, 5 * second, 0, 0)}
        samples.add(sample("gateway-0", histograms=histograms, generation_tokens_total=150 * second), second)
    roster = everyone("tokenizer", now_s=1.0)
    roster.heard(registration("gateway-1", "starting", stage="connecting"), "gateway-1", 1.0)
    text = printed(top_view(overview(roster, samples, 1.0, 1000.0)))
    assert "not ready: no tokenizer" in text
    assert "tokenizer" in text
    assert "◐ connecting" in text
    assert "55.0 ms" in text
    assert "0 of 200" in text
    assert "150" in text
