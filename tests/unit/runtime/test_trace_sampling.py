"""A share of the traces is exported, decided once for all processes, and the ones that matter are exported anyway."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.runtime import trace_sampling
from services.runtime.telemetry import Tracing, current_trace_id, current_traceparent
from services.runtime.trace_sampling import KeptTraces, ShareSampler

CHOSEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_CHOSEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


class Process:
    """One process's tracing, and what it exported."""

    def __init__(self, share: float, slow_s: float = 60.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.kept = KeptTraces(SimpleSpanProcessor(self.exporter), slow_s)
        provider = TracerProvider(sampler=ShareSampler(share))
        provider.add_span_processor(self.kept)
        self.tracing = Tracing(provider, self.kept)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_the_share_of_new_traces_is_exported(share: float, least: int, most: int) -> None:
    process = Process(share)
    for _ in range(1000):
        with process.tracing.span("request"):
            pass
    assert least <= len(process.names) <= most


@pytest.mark.parametrize(("parent", "names"), [(CHOSEN, ["request"]), (NOT_CHOSEN, [])])
def test_the_callers_choice_wins_over_the_share(parent: str, names: list[str]) -> None:
    for share in (0.0, 1.0):
        process = Process(share)
        with process.tracing.span("request", parent=parent):
            assert (current_traceparent() or "")[-2:] == parent[-2:]
            assert bool(current_trace_id()) == bool(names)
        assert process.names == names


def test_one_span_that_fails_brings_its_whole_trace() -> None:
    process = Process(0.0)
    told: list[int] = []
    process.tracing.tell_kept(told.append)
    with process.tracing.span("other"):
        pass
    with process.tracing.span("request", parent=NOT_CHOSEN):
        with process.tracing.span("encode"):
            pass
        with pytest.raises(ValueError, match="x"), process.tracing.span("step"):
            raise ValueError("x")
        with process.tracing.span("after"):
            pass
    assert process.names == ["encode", "step", "after", "request"]
    assert told == [TRACE_ID]
    assert all(span.context and span.context.trace_flags.sampled for span in process.exporter.get_finished_spans())


def test_a_slow_span_brings_its_trace() -> None:
    process = Process(0.0, slow_s=10.0)
    span = process.tracing.start("slow", start_s=1_700_000_000.0)
    span.end(end_time=1_700_000_010_000_000_000)
    process.tracing.start("quick", start_s=1_700_000_000.0).end(end_time=1_700_000_009_000_000_000)
    assert process.names == ["slow"]


def test_what_another_process_chose_is_exported_once() -> None:
    process = Process(0.0)
    with process.tracing.span("before", parent=NOT_CHOSEN):
        pass
    process.tracing.keep(TRACE_ID)
    process.tracing.keep(TRACE_ID)
    with process.tracing.span("later", parent=NOT_CHOSEN):
        pass
    assert process.names == ["before", "later"]


def test_memory_of_held_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_sampling, "MAX_HELD_SPANS", 100)
    monkeypatch.setattr(trace_sampling, "MAX_KEPT_TRACES", 10)
    process = Process(0.0)
    for number in range(1000):
        with process.tracing.span("request"):
            pass
        process.kept.keep(number)
    with process.tracing.span("mine", parent=NOT_CHOSEN):
        pass
    held = process.kept._held
    assert sum(map(len, held.values())) == process.kept._num_held == 100
    assert len(process.kept._kept) == 10
    process.kept.keep(TRACE_ID)
    assert process.names == ["mine"]
