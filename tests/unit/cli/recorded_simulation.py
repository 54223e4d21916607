"""Writes a simulation of the scheduler as a recording: every message when the scheduler hears or sends it."""

import itertools
from collections.abc import Iterator

from schemas.cache import CacheCommand
from schemas.codec import Message
from schemas.control import Cancel, ConfigValue, EffectiveConfig, Registration
from schemas.errors import NatterjackError
from schemas.output import Feedback, OutputFeedback
from schemas.step import StepResult
from services.recording.capture_file import Captured, CaptureWriter
from services.scheduler.requests import Request
from tests.unit.recording.captured_traffic import captured
from tests.unit.scheduler.scheduling_traffic import capacity
from tests.unit.scheduler.simulated_path import BLOCK_SIZE, Driver, Faults, SimulatedPath


class RecordedSimulation(SimulatedPath):
    """A simulated path whose scheduler is tapped."""

    def __init__(
        self,
        seed: int,
        writer: CaptureWriter,
        *,
        num_executors: int,
        num_blocks: int,
        depth: int,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(
            seed,
            num_executors=num_executors,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            depth=depth,
            faults=Faults(),
        )
        self._writer = writer
        self._inboxes: Iterator[int] = itertools.count(1)
        self._open_inbox: dict[str, str] = {}
        limits = self.limits
        values = {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "lookahead_tokens": limits.lookahead_tokens,
            "plan_depth": depth,
            "target_itl_ms": limits.target_itl_s * 1e3,
            "ageing_s": limits.ageing_s,
        }
        shown = {f"scheduler.{key}": ConfigValue(value=value, source="--set") for key, value in values.items()}
        config = EffectiveConfig(instance="scheduler-0", incarnation="a", version="0", values=shown)
        self.say(config, "$KV.nj_config.scheduler-0")
        for driver in self.drivers:
            registration = Registration(
                instance=driver.name,
                incarnation="a",
                role="executor",
                model="smol",
                state="ready",
                capacity=capacity(num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_host_blocks),
            )
            self.say(registration, f"$KV.nj_registry.{driver.name}")

    def say(self, message: Message, subject: str, reply: str | None = None) -> None:
        heard: Captured = captured(message, subject, float(self.now), reply=reply)
        self._writer.write(Captured(heard.arrived_s, subject, heard.body, heard.schema, reply=reply))

    def arrive(self) -> None:
        super().arrive()
        self.say(self.jobs[next(reversed(self.jobs))].request.work, "nj.v1.work.smol.normal")

    def fail(self, request: Request, error: NatterjackError) -> None:
        name = request.work.request_id
        if name in self.jobs:
            self.say(Cancel(request_id=name), f"nj.v1.cancel.{name}")
        super().fail(request, error)

    def hear_result(self, driver: Driver, result: StepResult) -> None:
        self.say(result, f"nj.v1.exec.{driver.name}.result")
        super().hear_result(driver, result)

    def deliver_command(self, driver: Driver) -> None:
        state, pools = driver.state, self.pools
        replies = []

        class Tapped:
            def apply(self, command: CacheCommand):
                replies.append(pools.apply(command))
                return replies[-1]

        assert state is not None
        inbox = self._open_inbox.pop(driver.name)
        self.pools = Tapped()  # type: ignore[assignment]
        try:
            super().deliver_command(driver)
        finally:
            self.pools = pools
        if replies:
            self.say(replies[0], inbox)
        else:
            self._open_inbox[driver.name] = inbox

    def end(self, sequence) -> None:
        request = sequence.request
        if request.error is None and self.book.get(request.work.request_id) is request:
            item = Feedback(
                request_id=request.work.request_id, epoch=request.epoch, event="stopped", index=sequence.index
            )
            self.say(OutputFeedback(tokenizer="tokenizer-0", items=(item,)), "nj.v1.feedback.scheduler-0")
        super().end(sequence)

    def check(self) -> None:
        """Whether blocks are right is the simulation's own test."""

    def tick(self) -> None:
        commands = {driver.name: driver.command for driver in self.drivers}
        num_plans = {driver.name: len(driver.plans) for driver in self.drivers}
        super().tick()
        for driver in self.drivers:
            if driver.state is None:
                continue
            if driver.command is not None and commands[driver.name] is None:
                command = CacheCommand(
                    scheduler="scheduler-0",
                    executor=driver.name,
                    epoch=driver.state.epoch,
                    operations=tuple(driver.command),
                    num_copies=driver.state.num_copies,
                )
                inbox = self._open_inbox[driver.name] = f"_INBOX.{next(self._inboxes)}"
                self.say(command, "nj.v1.cache.smol", inbox)
            for plan in list(driver.plans)[num_plans[driver.name] :]:
                self.say(plan, f"nj.v1.exec.{driver.name}.plan")
