"""Watches a deployment while it is measured: processor time of its processes here, and every executor's steps.

Listens to the step results on the bus, which costs the deployment nothing: it asks for nothing and answers nothing.
"""

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar

from schemas.codec import Message
from services.bench.processes import all_cpu_seconds, find_processes
from services.bench.record import RequestRecord
from services.bench.step_times import ExecutorFigures, StepTime, busy_spans, executor_figures
from services.runtime.bus import Bus, Incoming
from services.runtime.registry import Registry


class StepTiming(Message):
    """The part of a `StepResult` that is of interest here: reading all of it would cost the client more."""

    SCHEMA: ClassVar[str] = "step_result"

    step: int
    duration_s: float = 0.0
    idle_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """What has been seen since `begin`."""

    processes: dict[str, int]
    steps: dict[str, list[StepTime]] = field(default_factory=dict)
    _cpu_before_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what came before: the measured load starts now."""
        for steps in self.steps.values():
            steps.clear()
        self._cpu_before_s = all_cpu_seconds(self.processes)

    def end(self) -> None:
        """Take the processor times: the measured load has ended. A process that was replaced meanwhile is left out."""
        after_s = all_cpu_seconds(self.processes)
        self.cpu_s = {name: after_s[name] - s for name, s in self._cpu_before_s.items() if name in after_s}

    def executors(self, records: Iterable[RequestRecord]) -> dict[str, ExecutorFigures]:
        """Return each executor's figures over the time in which these requests' answers were under way."""
        busy = busy_spans(records)
        return {name: executor_figures(steps, busy) for name, steps in self.steps.items()}

    def note(self, executor: str, timing: StepTiming) -> None:
        """Take one step."""
        self.steps[executor].append(StepTime(perf_counter(), timing.duration_s, timing.idle_s))


@contextlib.asynccontextmanager
async def watching(bus: Bus, registry: Registry) -> AsyncIterator[Watch]:
    """Listen until the block ends."""
    registrations = [entry.registration for entry in registry.entries()]
    watch = Watch(find_processes(registrations))
    async with contextlib.AsyncExitStack() as stack:
        for executor in (entry.instance for entry in registrations if entry.role == "executor"):
            watch.steps[executor] = []

            def receive(incoming: Incoming[StepTiming], executor: str = executor) -> None:
                watch.note(executor, incoming.message)

            subscription = await bus.subscribe(bus.subjects.result(executor), StepTiming, receive)
            stack.push_async_callback(subscription.close)
        yield watch
