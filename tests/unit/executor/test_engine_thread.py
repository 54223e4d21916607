"""The engine's one thread, with the echo engine: loads, runs plans in order, refuses gaps, ends when told."""

import queue
import threading
from typing import Any

import pytest

from engine_core import engine as engine_module
from engine_core.engine import EngineConfig, EngineInfo
from engine_core.errors import ModelError
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, StepPlan
from services.executor.engine_thread import MAX_QUEUED_PLANS, EngineThread, Events, StepOutcome

PROMPT = (5, 6, 7)


class Seen:
    """What the thread reported."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.loaded: queue.Queue[EngineInfo] = queue.Queue()
        self.outcomes: queue.Queue[StepOutcome] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()

    def events(self) -> Events:
        return Events(
            progress=lambda stage, fraction: self.stages.append(stage),
            loaded=self.loaded.put,
            stepped=self.outcomes.put,
            failed=self.failures.put,
        )


def started(seen: Seen, *, engine: str = "echo", **config: Any) -> EngineThread:
    values = {"block_size": 4, "num_blocks": 16, "vocab_size": 100}
    thread = EngineThread(engine, EngineConfig(**(values | config)), seen.events())
    thread.start()
    return thread


def plan(step: int, num_tokens: int, *, is_new: bool = False) -> StepPlan:
    data = NewSequence(
        sequence=1,
        request_id="r",
        token_ids=PROMPT,
        prompt_len=3,
        max_len=8,
        blocks=(3, 1),
        sampling=SamplingParams(),
    )
    runs = (Run(sequence=1, num_tokens=num_tokens),) if num_tokens else ()
    return StepPlan(scheduler="s", epoch=1, step=step, new=(data,) if is_new else (), run=runs)


def test_plans_run_in_order_and_the_prompt_is_said_again() -> None:
    seen = Seen()
    thread = started(seen)
    assert seen.loaded.get(timeout=5).num_blocks == 16
    assert seen.stages[-1] == "warming up"
    for step in range(1, 6):
        assert thread.submit(plan(step, 3 if step == 1 else 1, is_new=step == 1))
    outcomes = [seen.outcomes.get(timeout=5) for _ in range(5)]
    assert [outcome.result.sampled[0].token for outcome in outcomes] == [5, 6, 7, 5, 6]
    assert [outcome.result.step for outcome in outcomes] == [1, 2, 3, 4, 5]
    assert outcomes[-1].result.sampled[0].finish_reason == "length"
    assert [ended.num_generated for ended in outcomes[-1].ended] == [5]
    assert all(outcome.result.duration_s > 0 and outcome.result.idle_s >= 0 for outcome in outcomes)
    thread.stop(5)
    assert not thread._thread.is_alive()


def test_gap_becomes_a_fault_and_a_doubled_plan_is_answered_with_the_same_result() -> None:
    seen = Seen()
    thread = started(seen)
    for message in (plan(1, 3, is_new=True), plan(1, 3, is_new=True), plan(3, 1), plan(2, 0)):
        thread.submit(message)
    first, again, fault, empty = (seen.outcomes.get(timeout=5).result for _ in range(4))
    assert (first.fault, first.step) == (None, 1)
    assert again == first
    assert (fault.fault, fault.step) == ("expected step 2 of epoch 1, got 3", 3)
    assert (empty.step, empty.sampled) == (2, ())
    thread.stop(5)


def test_model_that_cannot_be_loaded_is_reported() -> None:
    seen = Seen()
    started(seen, vocab_size=0)
    assert isinstance(seen.failures.get(timeout=5), ModelError)


def test_step_that_fails_ends_the_thread_with_its_cause() -> None:
    seen = Seen()
    thread = started(seen, vocab_size=2)  # the prompt's tokens are outside of it
    thread.submit(plan(1, 3, is_new=True))
    assert "vocabulary" in str(seen.failures.get(timeout=5))
    thread.stop(5)
    assert not thread._thread.is_alive()


def test_too_many_plans_are_refused_and_a_busy_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Stuck:
        info = None

        def warm_up(self) -> None:
            release.wait(5)

    monkeypatch.setattr("services.executor.engine_thread.load_engine", lambda *_: Stuck())
    assert "echo" in engine_module.ENGINES
    thread = started(Seen())
    assert [thread.submit(plan(1, 0)) for _ in range(MAX_QUEUED_PLANS + 1)] == [True] * MAX_QUEUED_PLANS + [False]
    thread.stop(0.01)
    assert thread._thread.is_alive()
    release.set()
