"""What an instance tells consoles: bounded, off the path of requests, and nothing while nobody looks."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from schemas.control import Registration
from schemas.errors import QueueFull
from schemas.telemetry import MetricSample, SpanBatch
from services.runtime import console_feed
from services.runtime.bus import Bus
from services.runtime.console_feed import BATCH_SPANS, MAX_WAITING, ConsoleFeed, WaitingSpans
from services.runtime.finished_spans import MAX_ATTRIBUTE_CHARS, MAX_EVENTS, finished_span
from services.runtime.metrics import Metrics
from services.runtime.registry import Registry
from services.runtime.telemetry import Tracing
from tests.conftest import BusFactory

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def registration(role="executor", instance="executor-0", **more):
    return Registration(instance=instance, incarnation="a", role=role, model="smol", state="ready", **more)


@pytest.fixture
def waiting():
    provider, spans = TracerProvider(), WaitingSpans()
    provider.add_span_processor(spans)
    return spans, Tracing(provider)


def record(tracing, count=1):
    for number in range(count):
        tracing.record(f"span {number}", parent=PARENT, start_s=100.0, attributes={})


def test_spans_are_not_kept_while_nobody_wants_them(waiting):
    spans, tracing = waiting
    record(tracing)
    assert (spans.take(), spans.num_dropped) == ([], 0)


def test_what_does_not_fit_is_dropped_and_counted(waiting):
    spans, tracing = waiting
    spans.want(1.0)
    record(tracing, MAX_WAITING + 7)
    assert spans.num_dropped == 7
    taken = spans.take()
    assert (len(taken), taken[0].name) == (BATCH_SPANS, "span 0")


def test_a_share_of_the_traces_is_the_same_one_everywhere_and_failures_are_always_kept(waiting):
    spans, tracing = waiting
    spans.want(0.25)
    for number in range(64):
        for _ in range(2):  # two spans of one trace
            tracing.record(
                "one", parent=f"00-{'a' * 24}{number << 26:08x}-b7ad6b7169203331-01", start_s=0, attributes={}
            )
    kept = [span.context.trace_id % (1 << 32) >> 26 for span in spans.take()]
    assert kept == [number for number in range(16) for _ in range(2)]
    with pytest.raises(QueueFull), tracing.span("failing", parent=f"00-{'f' * 32}-b7ad6b7169203331-01"):
        raise QueueFull("full")
    assert [span.name for span in spans.take()] == ["failing"]


def test_a_span_keeps_what_a_waterfall_needs(waiting):
    spans, tracing = waiting
    spans.want(1.0)
    other = SpanContext(1, 0xABC, False, TraceFlags(1))
    span = tracing.start("work", parent=PARENT)
    span.set_attributes({"text": "x" * 1000, "number": 7, "share": 0.5, "flag": True, "list": ("a", "b")})
    for number in range(MAX_EVENTS + 5):
        span.add_event(f"event {number}", {"n": number})
    span.add_link(other)
    span.set_status(Status(StatusCode.ERROR, "queue_full"))
    span.end()
    message = finished_span(spans.take()[0])
    assert message == type(message).model_validate(message.model_dump())
    assert (message.trace_id, message.parent_id) == (PARENT[3:35], PARENT[36:52])
    assert message.attributes == {
        "text": "x" * MAX_ATTRIBUTE_CHARS,
        "number": 7,
        "share": 0.5,
        "flag": True,
        "list": "a, b",
    }
    assert (len(message.events), message.links, message.error) == (MAX_EVENTS, (f"{0xABC:016x}",), "queue_full")
    assert message.duration_s >= 0


@pytest.mark.parametrize("kind", SpanKind)
def test_every_kind_of_span_has_its_name(waiting, kind):
    spans, tracing = waiting
    spans.want(1.0)
    with tracing.span("one", kind=kind):
        pass
    assert finished_span(spans.take()[0]).kind == kind.name.lower()


class Heard:
    """A console's ears."""

    def __init__(self) -> None:
        self.spans: list[SpanBatch] = []
        self.samples: list[MetricSample] = []

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(bus.subjects.spans_all, SpanBatch, lambda heard: self.spans.append(heard.message))
        await bus.subscribe(bus.subjects.samples_all, MetricSample, lambda heard: self.samples.append(heard.message))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(console_feed, "PERIOD_S", 0.01)


async def test_samples_come_always_and_spans_while_a_console_is_there(
    quick, connect_memory_bus: BusFactory, tracing: Tracing, eventually
):
    bus, heard, metrics = await connect_memory_bus(), Heard(), Metrics("smol")
    await heard.listen(bus)
    metrics.counter("generation_tokens_total").add(5)
    metrics.gauge("num_requests_running", lambda: 3)
    metrics.gauge("num_requests_waiting", lambda: float("nan"))
    metrics.histogram("inter_token_latency_seconds").observe(0.01, 4)
    metrics.histogram("bus_hop_seconds", "step_plan").observe(0.01)
    metrics.counter("num_preemptions_total")
    async with Registry(bus) as registry, ConsoleFeed(bus, registration(), registry, metrics, with_spans=True):
        await eventually(lambda: heard.samples)
        record(tracing)
        assert heard.spans == []
        console = registration("console", "console-0")
        await bus.kv_put(bus.subjects.registry, "console-0", console)
        await eventually(lambda: record(tracing) or heard.spans)
    values = {(value.name, *value.labels.values()): value.value for value in heard.samples[-1].values}
    assert values["generation_tokens_total",] == 5
    assert values["num_requests_running",] == 3
    assert values["bus_hop_seconds_count", "step_plan"] == 1
    assert ("num_requests_waiting",) not in values
    assert values["process_resident_memory_bytes",] > 1e6
    (histogram,) = heard.samples[-1].histograms
    assert (histogram.name, sum(histogram.counts)) == ("inter_token_latency_seconds", 4)
    assert heard.spans[0].instance == "executor-0"


async def test_the_last_spans_are_sent_at_the_end_and_none_when_switched_off(
    quick, connect_memory_bus: BusFactory, tracing: Tracing, eventually
):
    bus, heard = await connect_memory_bus(), Heard()
    await heard.listen(bus)
    await bus.kv_put(bus.subjects.registry, "console-0", registration("console", "console-0"))
    async with Registry(bus) as registry:
        async with ConsoleFeed(bus, registration(), registry, Metrics(), with_spans=False):
            await eventually(lambda: len(heard.samples) > 2)
            record(tracing)
        assert heard.spans == []
        async with ConsoleFeed(bus, registration(), registry, Metrics(), with_spans=True) as feed:
            await eventually(lambda: feed._spans._bound)
            record(tracing, 3)
        await eventually(lambda: sum(len(batch.spans) for batch in heard.spans) == 3)


async def test_a_bug_in_a_gauge_does_not_end_the_feed(quick, connect_memory_bus: BusFactory, eventually, caplog):
    bus, heard, metrics = await connect_memory_bus(), Heard(), Metrics()
    await heard.listen(bus)
    broken = True

    def read() -> float:
        if broken:
            raise ZeroDivisionError
        return 1.0

    metrics.gauge("num_requests_running", read)
    async with Registry(bus) as registry, ConsoleFeed(bus, registration(), registry, metrics, with_spans=True):
        await eventually(lambda: "a sample could not be made" in caplog.text)
        broken = False
        await eventually(lambda: heard.samples)
