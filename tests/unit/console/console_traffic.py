"""Spans, heartbeats and samples as instances send them, for the console's tests."""

from schemas.control import Registration
from schemas.telemetry import FinishedSpan, MetricSample, SampledHistogram, SampledValue, SpanBatch

BOUNDS = (0.01, 0.1, 1.0)


def span(
    trace_id, name, start_s=100.0, duration_s=0.01, *, span_id="", parent_id="", kind="internal", error="", **more
):
    return FinishedSpan(
        trace_id=trace_id,
        span_id=span_id or f"{trace_id}-{name}-{start_s}",
        parent_id=parent_id,
        name=name,
        kind=kind,
        start_s=start_s,
        duration_s=duration_s,
        attributes=more.pop("attributes", {}),
        error=error,
        **more,
    )


def batch(*spans, instance="gateway-0", role="gateway", num_dropped=0):
    return SpanBatch(instance=instance, role=role, spans=spans, num_dropped=num_dropped)


def of_request(request_id, choice=0, **attributes):
    return {"natterjack.request_id": request_id, "natterjack.choice": choice, **attributes}


def one_request(number):
    """The batches of one plain request, as they come."""
    trace_id, request_id = f"trace-{number}", f"req-{number}"
    admit = of_request(request_id) | {"gen_ai.usage.cache_read.input_tokens": 16}
    return [
        batch(
            span(trace_id, "publish work_item", 100.002, 0.001, span_id="p", parent_id="g"),
            instance="tokenizer-0",
            role="tokenizer",
        ),
        batch(
            span(trace_id, "scheduler.queue", 100.003, 0.002, parent_id="p", attributes=of_request(request_id)),
            span(trace_id, "scheduler.admit", 100.005, 0.001, parent_id="p", attributes=admit),
            instance="scheduler-0",
            role="scheduler",
        ),
        batch(
            span(
                trace_id,
                "executor.prefill",
                100.006,
                0.01,
                parent_id="p",
                attributes=of_request(request_id) | {"gen_ai.usage.input_tokens": 40},
            ),
            span(
                trace_id,
                "executor.decode",
                100.016,
                0.1,
                parent_id="p",
                attributes=of_request(request_id) | {"gen_ai.usage.output_tokens": 20},
            ),
            instance="executor-0",
            role="executor",
        ),
        batch(
            span(
                trace_id,
                "tokenizer.detokenize",
                100.017,
                0.1,
                parent_id="p",
                attributes={
                    "natterjack.request_id": request_id,
                    "natterjack.epoch": 1,
                    "gen_ai.usage.output_tokens": 20,
                },
            ),
            instance="tokenizer-0",
            role="tokenizer",
        ),
        batch(
            span(
                trace_id,
                "POST /v1/chat/completions",
                100.0,
                0.12,
                span_id="g",
                kind="server",
                attributes={"gen_ai.response.id": f"chatcmpl-{request_id}", "gen_ai.request.model": "smol"},
            )
        ),
    ]


def registration(instance="executor-0", state="ready", incarnation="a", **more):
    role = instance.rpartition("-")[0]
    return Registration(instance=instance, incarnation=incarnation, role=role, model="smol", state=state, **more)


def sample(instance="gateway-0", incarnation="a", histograms=None, **values):
    """A sample of counters and gauges; `name__label__value` for one with a label."""
    return MetricSample(
        instance=instance,
        incarnation=incarnation,
        role=instance.rpartition("-")[0],
        time_s=0.0,
        values=tuple(_value(name, value) for name, value in values.items()),
        histograms=tuple(
            SampledHistogram(name=name, bounds=BOUNDS, counts=counts) for name, counts in (histograms or {}).items()
        ),
    )


def _value(name, value):
    name, _, label = name.partition("__")
    labels = dict([label.split("__")]) if label else {}
    return SampledValue(name=name, labels=labels, value=value)
