"""Replays executors from a recording: their plans again, on the engine of choice; the tokens are compared.

Plans name blocks that earlier plans have filled, so a replay begins where an executor was idle, and must know every
block that a cached prefix stands in. Step numbers count from there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from schemas.codec import SCHEMA_HEADER, Message, encode, schema_of
from schemas.step import StepPlan, StepResult
from schemas.subjects import raw_of
from services.cli.replay_service import RecordedInstances, Stage, open_stage, read_instances, usable_settings
from services.cli.replay_service import recorded_values as values_of
from services.executor.service import ExecutorService
from services.executor.settings import Settings
from services.recording.capture_file import Capture, CaptureError
from services.recording.comparison import Comparison, Rules
from services.recording.message_kinds import kind_name, message_of
from services.recording.request_tracker import executor_of
from services.recording.sequence_outcomes import SequenceReader, compare_sequences
from services.runtime.bus import Incoming

STEP_TIMEOUT_S = 300.0

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class PlanFeed:
    """The plans of one executor that can be run again, in order, numbered anew; raises CaptureError where one cannot.

    Pure: it leaves out what comes before the executor was seen idle, or after a plan that is missing. A block that was
    given to a sequence since then holds, where it counts as cached, what that sequence put there.
    """

    executor: str
    block_size: int
    num_skipped: int = 0
    _epoch: int = 0
    _last: int | None = None
    _offset: int = 0
    _known: set[int] = field(default_factory=set)

    def take(self, plan: StepPlan) -> StepPlan | None:
        """Return the plan as it is to be run; None for one that was sent twice or cannot be run."""
        if (plan.epoch, plan.step) <= (self._epoch, self._last or 0):
            return None
        if plan.epoch > self._epoch:
            self._epoch, self._last, self._offset = plan.epoch, None, 0
        if self._last is None and {run.sequence for run in plan.run} == {new.sequence for new in plan.new}:
            self._offset = plan.step - 1
        elif self._last is None or plan.step != self._last + 1:
            self.num_skipped += 1
            return None
        self._last = plan.step
        self._follow(plan)
        return plan.model_copy(update={"step": plan.step - self._offset})

    def _follow(self, plan: StepPlan) -> None:
        for source, target in plan.copies:
            (self._known.add if source in self._known else self._known.discard)(target)
        for new in plan.new:
            used = new.blocks[: -(-new.num_computed // self.block_size)]
            if not self._known.issuperset(used):
                raise CaptureError(
                    f"Step {plan.step} of {self.executor} uses cached blocks of {new.request_id} that were computed "
                    "before the recording began: record from the executor's start on."
                )
            self._known.update(new.blocks)
        for run in plan.run:
            self._known.update(run.blocks)


async def replay_executor(capture: Capture, file: Path | None, overrides: Iterable[str]) -> Comparison:
    """Return how the sequences of every recorded executor compare; raises CaptureError."""
    _check_redaction(capture)
    instances, overrides = read_instances(capture), tuple(overrides)
    result = Comparison(unit="sequences")
    num_skipped = 0
    for name in _executors(capture):
        found, skipped = await _replay_one(capture, name, instances, file, overrides)
        num_skipped += skipped
        result.num_compared += found.num_compared
        result.num_tokens += found.num_tokens
        result.differences += found.differences
    if not result.is_usable:
        raise CaptureError(
            f"{capture.path} holds no plan that an executor could run again: it needs step_plan and step_result from "
            "an executor's beginning, or from a moment on in which it was idle."
        )
    if num_skipped:
        result.skipped["plans"] = f"{num_skipped} plans lie before the executor was seen idle, or behind a missing one"
    return result


def _check_redaction(capture: Capture) -> None:
    redaction = capture.header.redaction
    if redaction == "ids":
        raise CaptureError(f"In {capture.path}, token ids were redacted: record with --redact none or text.")
    if redaction == "text" and any(new.sampling.grammar for plan in _said(capture, StepPlan) for new in plan.new):
        raise CaptureError(f"In {capture.path}, the grammars of structured output were redacted with the text.")


def _said(capture: Capture, kind: type[M], executor: str | None = None) -> Iterator[M]:
    """Yield the messages of one kind to or from one executor, None: any."""
    for captured in capture.messages():
        if kind_name(captured) != kind.SCHEMA or executor not in (None, executor_of(captured.subject)):
            continue
        if (message := message_of(captured, kind)) is not None:
            yield message


def _executors(capture: Capture) -> list[str]:
    """Return the subject tokens of the executors that were sent plans."""
    return sorted({executor_of(c.subject) for c in capture.messages() if kind_name(c) == StepPlan.SCHEMA})


async def _replay_one(
    capture: Capture, token: str, instances: RecordedInstances, file: Path | None, overrides: tuple[str, ...]
) -> tuple[Comparison, int]:
    name = raw_of(token)
    values = _values(capture, token, instances)
    settings = usable_settings(Settings, "executor", file, overrides, values)
    feed = PlanFeed(name, settings.executor.block_size)
    expected, found = SequenceReader(), SequenceReader()
    async with (
        open_stage(capture.header.prefix) as stage,
        stage.running("executor", name, settings, ExecutorService) as service,
        broken_off(service.wait()) as broken,
    ):
        run = _Run(stage, name, found)
        await run.listen()
        for plan in _said(capture, StepPlan, token):
            if (again := feed.take(plan)) is not None:
                expected.see_plan(name, plan)
                await run.step(again, broken)
    for result in _said(capture, StepResult, token):
        expected.see_result(name, result)
    return compare_sequences(expected.sequences, found.sequences, Rules()), feed.num_skipped


def _values(capture: Capture, token: str, instances: RecordedInstances) -> dict[str, Any]:
    """Return the recorded settings, with what the engine made of them, and room for what the plans name."""
    values = values_of(instances, "executor")
    registration = instances.executors.get(raw_of(token))
    if registration is None or (capacity := registration.capacity) is None:
        return values
    last_block, longest = 0, 1
    for plan in _said(capture, StepPlan, token):
        longest = max([longest, *(new.max_len for new in plan.new)])
        for blocks in (*(new.blocks for new in plan.new), *(run.blocks for run in plan.run)):
            last_block = max([last_block, *blocks])
    num_blocks = max(last_block + 1, -(-longest // capacity.block_size))
    return {
        **values,
        "executor.engine": capacity.engine,
        "executor.block_size": capacity.block_size,
        "executor.num_blocks": capacity.num_blocks if capacity.num_host_blocks else num_blocks,  # host's are behind
        "executor.num_host_blocks": capacity.num_host_blocks,
        "model.max_model_len": longest,
    }


@dataclass(slots=True)
class _Run:
    """One executor's plans in, one after the other, and its results out."""

    stage: Stage
    name: str
    found: SequenceReader
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        bus = self.stage.connect()
        await bus.subscribe(bus.subjects.result(self.name), StepResult, self._take)

    def _take(self, incoming: Incoming[StepResult]) -> None:
        self.found.see_result(self.name, incoming.message)
        self._answered.set()

    async def step(self, plan: StepPlan, broken: "asyncio.Task[None]") -> None:
        """Run one plan; raises CaptureError when the engine fails, or does not answer."""
        self.found.see_plan(self.name, plan)
        self._answered.clear()
        bus = self.stage.connect()
        await bus.transport.publish(bus.subjects.plan(self.name), encode(plan), {SCHEMA_HEADER: schema_of(plan)})
        answered = asyncio.create_task(self._answered.wait())
        await asyncio.wait({answered, broken}, timeout=STEP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            answered.cancel()
            cause = f": {broken.exception()}" if broken.done() else ""
            raise CaptureError(f"The executor did not answer step {plan.step} of epoch {plan.epoch}{cause}.")


@contextlib.asynccontextmanager
async def broken_off(waiting: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Task[None]"]:
    """Yield the task that ends when the service fails by itself."""
    task = asyncio.ensure_future(waiting)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
