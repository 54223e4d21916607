"""The executor on the bus: what it publishes of itself, plans in, results out, and how it fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.control import Registration
from schemas.errors import Unavailable
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, SampledToken, StepPlan, StepResult
from services.executor.service import ExecutorService
from services.executor.settings import Settings
from services.runtime.bus import Bus
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context, StartFailed
from services.runtime.telemetry import Tracing, current_traceparent

Eventually = Callable[..., Awaitable[None]]
Build = Callable[..., ExecutorService]


@pytest.fixture
async def build(memory_bus: Bus, tracing: Tracing) -> AsyncIterator[Build]:
    """Build an executor: `build(vocab_size=10)`."""
    services: list[ExecutorService] = []
    own = Registration(instance="executor-0", incarnation="life-1", role="executor", model="smol", state="starting")

    def build_service(source: str = "builtin:bytes", **changes: Any) -> ExecutorService:
        context = Context(memory_bus, tracing, Registry(memory_bus), Heartbeat(memory_bus, own))
        executor = {"engine": "echo", "num_blocks": 16, "block_size": 4} | changes
        settings = Settings.model_validate({"model": {"source": source}, "executor": executor})
        services.append(ExecutorService(settings, context))
        return services[-1]

    yield build_service
    for service in services:
        await service.stop()


@pytest.fixture
async def results(memory_bus: Bus) -> list[StepResult]:
    seen: list[StepResult] = []
    subject = memory_bus.subjects.result("executor-0")
    await memory_bus.subscribe(subject, StepResult, lambda incoming: seen.append(incoming.message))
    return seen


def plan(step: int, num_tokens: int = 1, *, traceparent: str | None = None, max_len: int = 5) -> StepPlan:
    data = NewSequence(
        sequence=1,
        request_id="r",
        token_ids=(5, 6, 7),
        prompt_len=3,
        max_len=max_len,
        blocks=(3, 1),
        sampling=SamplingParams(),
        traceparent=traceparent,
    )
    run = Run(sequence=1, num_tokens=num_tokens)
    return StepPlan(scheduler="s", epoch=1, step=step, new=(data,) if step == 1 else (), run=(run,))


async def test_capacity_is_published_and_plans_are_answered(
    build: Build, memory_bus: Bus, results: list[StepResult], eventually: Eventually
) -> None:
    service = build()
    await service.start()
    capacity = service._context.heartbeat.registration.capacity
    assert capacity is not None
    assert (capacity.engine, capacity.num_blocks, capacity.block_size, capacity.max_model_len) == ("echo", 16, 4, 64)
    for step in (1, 2):
        await memory_bus.publish(memory_bus.subjects.plan("executor-0"), plan(step, 3 if step == 1 else 1))
    await eventually(lambda: len(results) == 2)
    assert [result.sampled[0].token for result in results] == [5, 6]
    assert {result.executor for result in results} == {"executor-0"}
    await service.drain()
    await memory_bus.publish(memory_bus.subjects.plan("executor-0"), plan(3))
    await asyncio.sleep(0.02)
    assert len(results) == 2


async def test_vectors_that_exceed_a_message_fail_their_sequences_only(
    build: Build, memory_bus: Bus, results: list[StepResult], eventually: Eventually
) -> None:
    service = build()
    await service.start()
    vector = SampledToken(sequence=1, position=3, token=-1, finish_reason="stop", embedding="A" * (1 << 20))
    token = SampledToken(sequence=2, position=9, token=5)
    await service._publish(
        memory_bus.subjects.result("executor-0"),
        StepResult(executor="executor-0", epoch=1, step=1, sampled=(vector, token)),
    )
    await eventually(lambda: results)
    failed, kept = results[0].sampled
    assert (failed.sequence, failed.finish_reason, failed.embedding) == (1, "error", None)
    assert kept == token


async def test_prompt_and_answer_are_spans_of_the_request(
    build: Build, memory_bus: Bus, eventually: Eventually, tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    service = build()
    await service.start()
    with tracing.span("client"):
        traceparent = current_traceparent()
    subject = memory_bus.subjects.plan("executor-0")
    await memory_bus.publish(subject, plan(1, 3, traceparent=traceparent))
    await memory_bus.publish(subject, plan(2))
    await eventually(lambda: any(span.name == "executor.decode" for span in span_exporter.get_finished_spans()))
    spans = {span.name: span for span in span_exporter.get_finished_spans()}
    assert spans["executor.prefill"].context.trace_id == spans["client"].context.trace_id
    assert dict(spans["executor.prefill"].attributes or {})["gen_ai.usage.input_tokens"] == 3
    assert dict(spans["executor.decode"].attributes or {})["gen_ai.usage.output_tokens"] == 2


async def test_sequence_dropped_before_its_first_token_has_a_prompt_span_only(
    build: Build, memory_bus: Bus, eventually: Eventually, tracing: Tracing, span_exporter: InMemorySpanExporter
) -> None:
    service = build()
    await service.start()
    with tracing.span("client"):
        traceparent = current_traceparent()
    subject = memory_bus.subjects.plan("executor-0")
    await memory_bus.publish(subject, plan(1, 2, traceparent=traceparent))
    await memory_bus.publish(subject, StepPlan(scheduler="s", epoch=1, step=2, drop=(1,)))
    await eventually(lambda: any(span.name == "executor.prefill" for span in span_exporter.get_finished_spans()))
    assert "executor.decode" not in {span.name for span in span_exporter.get_finished_spans()}


async def test_missing_model_file_says_what_to_do(build: Build, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"nothing\.gguf"):
        await build(str(tmp_path / "nothing.gguf"), engine="reference").start()


async def test_pool_that_cannot_be_is_a_start_that_failed(build: Build) -> None:
    service = build()
    service._settings = service._settings.model_copy(
        update={"model": service._settings.model.model_copy(update={"max_model_len": 10_000})}
    )
    with pytest.raises(StartFailed, match="cannot be loaded"):
        await service.start()


async def test_broken_engine_ends_the_service(build: Build, memory_bus: Bus) -> None:
    service = build(vocab_size=2)
    await service.start()
    await memory_bus.publish(memory_bus.subjects.plan("executor-0"), plan(1, 3))
    with pytest.raises(ValueError, match="vocabulary"):
        async with asyncio.timeout(5):
            await service.wait()


async def test_result_that_cannot_be_sent_is_left_to_the_scheduler(
    build: Build,
    memory_bus: Bus,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    results: list[StepResult],
) -> None:
    service = build()
    await service.start()
    publish = memory_bus.publish

    async def fail(subject: str, message: Any) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(memory_bus, "publish", fail)
    await publish(memory_bus.subjects.plan("executor-0"), plan(1, 3))
    await eventually(lambda: "the result of step 1 was lost" in caplog.text)
    monkeypatch.setattr(memory_bus, "publish", publish)
    await publish(memory_bus.subjects.plan("executor-0"), plan(2))
    await eventually(lambda: [result.step for result in results] == [2])


async def test_too_many_plans_are_dropped_with_a_word(
    build: Build, memory_bus: Bus, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    service = build(step_time_s=0.05)
    await service.start()
    for step in range(1, 80):
        await memory_bus.publish(memory_bus.subjects.plan("executor-0"), plan(step, max_len=60))
    await eventually(lambda: "too many plans" in caplog.text)


@pytest.mark.parametrize("changes", [{"engine": "magic"}, {"engine": "reference"}])
def test_engine_and_model_must_go_together(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="engine"):
        Settings.model_validate({"model": {"source": "builtin:bytes"}, "executor": changes})
