"""Some steps are shown as traces of their own; they and the requests that they served name each other."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, StepPlan, StepResult
from services.executor.engine_thread import StepOutcome
from services.executor.step_spans import MAX_LINKS, StepSpans
from services.runtime.telemetry import Tracing

TRACES = ["00-" + f"{number:032x}" + "-" + f"{number:016x}" + "-01" for number in (0, 1, 2)]


def new(number: int) -> NewSequence:
    return NewSequence(
        sequence=number,
        request_id=f"r{number}",
        index=0,
        token_ids=(1, 2),
        prompt_len=2,
        num_computed=0,
        max_len=100,
        stop_token_ids=(),
        blocks=(0,),
        sampling=SamplingParams(),
        traceparent=TRACES[number],
    )


def plan(step: int, *sequences: int, epoch: int = 1, fresh: bool = False) -> StepPlan:
    runs = tuple(Run(sequence=number, num_tokens=1) for number in sequences)
    return StepPlan(
        scheduler="s", epoch=epoch, step=step, run=runs, new=tuple(map(new, sequences)) if fresh else (), drop=()
    )


def outcome(step: int, phase: str = "decode", *, epoch: int = 1, fault: str = "") -> StepOutcome:
    result = StepResult(executor="", epoch=epoch, step=step, duration_s=0.5, **({"fault": fault} if fault else {}))
    return StepOutcome(result, [], phase)


def test_a_step_that_ends_prompts_links_to_its_requests_and_they_to_it(
    tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    spans = StepSpans(tracing)
    spans.planned(plan(1, 1, 2, fresh=True))
    spans.stepped(outcome(1, "prefill"), 100.0)
    (step,) = span_exporter.get_finished_spans()
    assert step.parent is None
    assert [link.context.trace_id for link in step.links] == [1, 2]
    assert (step.start_time, step.end_time) == (99_500_000_000, 100_000_000_000)
    assert dict(step.attributes or {}) == {
        "natterjack.step": 1,
        "natterjack.epoch": 1,
        "natterjack.phase": "prefill",
        "natterjack.num_sequences": 2,
        "natterjack.num_tokens": 2,
    }
    assert step.context is not None
    assert [link.context.span_id for link in spans.take_links(1)] == [step.context.span_id]
    assert spans.take_links(1) == []


def test_of_the_decode_steps_one_a_second_is_shown(tracing: Tracing, span_exporter: InMemorySpanExporter) -> None:
    spans = StepSpans(tracing)
    spans.planned(plan(1, 1, fresh=True))
    for number in range(1, 400):
        spans.planned(plan(number, 1, fresh=number == 1))
        spans.stepped(outcome(number), 100.0 + number / 10)
    shown = span_exporter.get_finished_spans()
    assert 35 <= len(shown) <= 41
    assert len(spans.take_links(1)) == MAX_LINKS
    assert not spans._plans


def test_steps_that_did_not_run_or_served_nobody_who_asks_are_not_shown(
    tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    spans = StepSpans(tracing)
    spans.stepped(outcome(9, "prefill"), 100.0)
    spans.planned(plan(1, 1, fresh=True))
    spans.stepped(outcome(1, fault="a plan is missing"), 100.0)
    spans.planned(plan(2, 1, epoch=2))
    spans.stepped(outcome(2, epoch=1), 100.0)
    spans.stepped(outcome(2, epoch=2), 100.0)
    assert span_exporter.get_finished_spans() == ()
