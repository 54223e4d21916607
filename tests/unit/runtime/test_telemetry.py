"""Spans make one tree over processes; logs carry the ids that lead to it, and no content."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from schemas.errors import QueueFull
from services.runtime.logs import request_logging, set_log_level, setup_logs
from services.runtime.settings import TelemetrySettings
from services.runtime.telemetry import (
    Tracing,
    context_of,
    current_traceparent,
    event,
    setup_telemetry,
)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Setting up telemetry replaces this process's log handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_nested_spans_are_parent_and_child(tracing: Tracing, span_exporter: InMemorySpanExporter) -> None:
    with tracing.span("outer", attributes={"a": 1}), tracing.span("inner"):
        pass
    inner, outer = span_exporter.get_finished_spans()
    assert inner.parent is not None
    assert outer.context is not None
    assert (inner.parent.span_id, outer.parent) == (outer.context.span_id, None)
    assert dict(outer.attributes or {}) == {"a": 1}


def test_parent_from_another_process_wins_over_the_current_span(
    tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    remote = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with tracing.span("local"), tracing.span("child", parent=remote):
        assert (current_traceparent() or "").startswith("00-0af7651916cd43dd8448eb211c80319c-")
    child = span_exporter.get_finished_spans()[0]
    assert child.parent is not None
    assert f"{child.parent.span_id:016x}" == "b7ad6b7169203331"


@pytest.mark.parametrize("broken", ["", "garbage", "00-0-0-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_unreadable_parent_begins_a_new_trace(
    tracing: Tracing, span_exporter: InMemorySpanExporter, broken: str
) -> None:
    with tracing.span("root", parent=broken):
        pass
    assert span_exporter.get_finished_spans()[0].parent is None


def test_span_that_is_started_and_ended_apart_does_not_become_current(
    tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    span = tracing.start("request", start_s=1700000000.25)
    assert current_traceparent() is None
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    tracing.record("step", parent=parent, start_s=1700000000.5, attributes={"num_tokens": 3})
    span.end()
    step, request = span_exporter.get_finished_spans()
    assert step.parent is not None
    assert request.context is not None
    assert step.parent.span_id == request.context.span_id
    assert request.start_time == pytest.approx(1_700_000_000_250_000_000, abs=1000)
    assert (step.end_time or 0) > (step.start_time or 0)


def test_a_recorded_span_is_like_one_that_was_started(tracing: Tracing, span_exporter: InMemorySpanExporter) -> None:
    """Also under a parent in a form that only a later version of the standard knows."""
    ids = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    shown = event("seen", 100.5, {"n": 1})
    for parent in (f"00-{ids}-01", f"01-{ids}-01-more", "unreadable"):
        tracing.record("step", parent=parent, start_s=100.0, end_s=101.0, attributes={"n": 2}, events=(shown,))
    plain, later, unreadable = span_exporter.get_finished_spans()
    for span in (plain, later, unreadable):
        assert (span.name, span.start_time, span.end_time) == ("step", 100 * 10**9, 101 * 10**9)
        assert [(e.name, e.timestamp) for e in span.events] == [("seen", int(100.5e9))]
        assert dict(span.attributes or {}) == {"n": 2}
        assert span.instrumentation_scope == later.instrumentation_scope
        assert span.resource == later.resource
    for span in (plain, later):
        assert span.parent is not None
        assert span.context is not None
        assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == ids
        assert span.context.trace_flags.sampled
    assert unreadable.parent is None


def test_no_context_without_a_parent() -> None:
    assert context_of(None) is None
    assert current_traceparent() is None


@pytest.mark.parametrize("error", [QueueFull("full"), ValueError("the secret prompt")])
def test_failed_span_is_marked_without_the_message(
    tracing: Tracing, span_exporter: InMemorySpanExporter, error: Exception
) -> None:
    with pytest.raises(type(error)), tracing.span("work"):
        raise error
    (span,) = span_exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.events == ()
    assert "secret" not in span.to_json()
    reason = "queue_full" if isinstance(error, QueueFull) else "ValueError"
    assert (span.status.description, dict(span.attributes or {})) == (reason, {"error.type": reason})


def test_json_logs_have_the_ids_of_request_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    tracing = setup_telemetry(TelemetrySettings(log_format="json"), service="gateway", instance="gateway-0")
    log = logging.getLogger("some.module")
    with tracing.span("request") as span, request_logging("req-1"):
        log.info("grüß %s", "dich")
    log.warning("outside", extra={"request_id": "req-2"})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    tracing.close()
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == "grüß dich"
    assert (first["level"], first["instance"], first["logger"]) == ("info", "gateway-0", "some.module")
    assert first["request_id"] == "req-1"
    assert first["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert first["time"].endswith("Z")
    assert second["request_id"] == "req-2"
    assert "trace_id" not in second
    assert "ValueError: why" in third["exception"]


def test_human_logs_are_one_line_with_the_ids_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    tracing = setup_telemetry(TelemetrySettings(log_level="warning"), service="gateway", instance="gateway-0")
    log = logging.getLogger("some.module")
    log.info("not shown")
    with request_logging("req-1"):
        log.warning("shown")
    tracing.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[gateway-0] ")
    assert line.endswith("WARNING shown request_id=req-1")


def test_setting_up_twice_does_not_log_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        setup_telemetry(TelemetrySettings(), service="gateway", instance="gateway-0").close()
    logging.getLogger().warning("once")
    assert capsys.readouterr().err.count("once") == 1


class Collector(BaseHTTPRequestHandler):
    """An OTLP/HTTP collector that keeps what it gets."""

    got: list[tuple[str, bytes]] = []

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep quiet."""


def test_spans_are_exported_to_the_configured_collector_at_the_end() -> None:
    Collector.got.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}/"
        tracing = setup_telemetry(TelemetrySettings(otlp_endpoint=endpoint), service="executor", instance="executor-0")
        with tracing.span("the span"):
            pass
        tracing.close()
        server.shutdown()
        thread.join()
    ((path, body),) = Collector.got
    assert path == "/v1/traces"
    for text in (b"the span", b"natterjack-executor", b"executor-0"):
        assert text in body


def test_exporter_can_be_given() -> None:
    exporter = InMemorySpanExporter()
    tracing = setup_telemetry(TelemetrySettings(), service="s", instance="i", exporter=exporter)
    with tracing.span("x"):
        pass
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.namespace"] == "natterjack"


def test_a_library_that_repeats_itself_is_heard_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs(TelemetrySettings(), "x")
    for _ in range(5):
        logging.getLogger("opentelemetry.exporter").warning("no collector")
        logging.getLogger("services").warning("mine")
    lines = capsys.readouterr().err.splitlines()
    assert sum("no collector" in line for line in lines) == 1
    assert sum("mine" in line for line in lines) == 5


def test_the_log_level_changes_while_the_process_runs(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs(TelemetrySettings(), "x")
    logging.getLogger("services").debug("not yet")
    set_log_level("debug")
    logging.getLogger("services").debug("now")
    with pytest.raises(ValueError, match="choose one of debug, info"):
        set_log_level("chatty")
    out = capsys.readouterr().err
    assert "not yet" not in out
    assert "now" in out
