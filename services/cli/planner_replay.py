"""Replays the scheduler's planner from a recording, without a bus: the same messages in the same order, the same plans?

What came from outside is taken from the recording: work, cancellations, stop strings, grants, results, and which
sequences were admitted. Everything that the planner decides from it (what runs, how many tokens, who is preempted) is
decided again by the scheduler's own code and compared with the recorded plan, message by message.

That is exact where the recording has the scheduler's own order of messages, as a simulation's has. A wiretap hears them
in the bus's order: when a loaded scheduler takes a result or a grant later than the recorder did, a plan may differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from schemas.cache import Acquire, CacheCommand, CacheReply
from schemas.control import Cancel, EffectiveConfig, ExecutorCapacity, Registration
from schemas.generation import OutputSpec, WorkItem
from schemas.output import OutputFeedback
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, StepPlan, StepResult
from services.cli.planner_report import PlanDifference, PlannerComparison
from services.recording.capture_file import Capture, Captured, CaptureError
from services.recording.message_kinds import kind_name, message_of
from services.recording.request_tracker import executor_of
from services.scheduler.executor_state import ExecutorState, OutOfStep
from services.scheduler.planner import Limits
from services.scheduler.requests import Request, Sequence, new_request

MAX_KEPT = 20
Place = tuple[str, int, int]
"""Executor, epoch, sequence."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """What the recording says of a sequence at its beginning: which choice, and how many tokens were known."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(slots=True)
class _Drive:
    """One executor in one epoch; `is_over` once sequences left it without a word in the recording.

    `num_before` steps had been planned when the recording began, None while that is not known.
    """

    state: ExecutorState
    last_number: int = 0
    num_before: int | None = None
    is_over: bool = False
    unheard: CacheReply | None = None

    def hear(self) -> None:
        """Take the answer of the cache manager that was held back."""
        reply, self.unheard = self.unheard, None
        if reply is not None and not self.is_over:
            self.state.apply_grants(reply)

    def is_heard_by(self, plan: StepPlan) -> bool:
        """Tell whether a plan uses blocks of the answer that is held back, or does its copies."""
        used = {begun.sequence: set(begun.blocks) for begun in plan.new}
        for run in plan.run:
            used.setdefault(run.sequence, set()).update(run.blocks)
        if self.unheard is None:
            return False
        uses_blocks = any(used.get(grant.sequence, set()).intersection(grant.blocks) for grant in self.unheard.grants)
        return uses_blocks or not set(plan.copies).isdisjoint(self.unheard.copies)


class PlannerReplay:
    """Takes a recording's messages in order; `result` says how the plans compare."""

    def __init__(self, begun: dict[Place, _Begun]) -> None:
        self.result = PlannerComparison()
        self._begun = begun
        self._limits: Limits | None = None
        self._depth = 1
        self._capacities: dict[str, ExecutorCapacity] = {}
        self._requests: dict[str, Request] = {}
        self._drives: dict[str, _Drive] = {}
        self._questions: dict[str, CacheCommand] = {}
        self._copies: dict[str, list[Sequence]] = {}

    def see(self, captured: Captured) -> None:
        """Take the next message."""
        match kind_name(captured):
            case "effective_config":
                self._configure(message_of(captured, EffectiveConfig))
            case "registration":
                registration = message_of(captured, Registration)
                if registration is not None and registration.capacity is not None:
                    self._capacities[registration.instance] = registration.capacity
            case "work_item":
                work = message_of(captured, WorkItem)
                if work is not None and work.request_id not in self._requests:
                    request = new_request(work, None, now_s=0.0, traceparent=captured.trace)
                    self._requests[work.request_id] = request
            case "cancel":
                cancel = message_of(captured, Cancel)
                if cancel is not None and (cancelled := self._requests.get(cancel.request_id)) is not None:
                    self._end([*cancelled.sequences, *self._copies.pop(cancel.request_id, ())])
            case "output_feedback":
                self._hear(message_of(captured, OutputFeedback))
            case "cache_command":
                self._ask(captured, message_of(captured, CacheCommand))
            case "cache_reply":
                self._grant(captured, message_of(captured, CacheReply))
            case "step_result":
                self._apply(executor_of(captured.subject), message_of(captured, StepResult))
            case "step_plan":
                self._plan(executor_of(captured.subject), message_of(captured, StepPlan))

    # ---- what came from outside

    def _configure(self, config: EffectiveConfig | None) -> None:
        values = {key: item.value for key, item in config.values.items()} if config is not None else {}
        wanted = ("max_num_seqs", "max_num_batched_tokens", "lookahead_tokens", "plan_depth")
        numbers = [value for name in wanted if isinstance(value := values.get(f"scheduler.{name}"), int)]
        if len(numbers) == len(wanted):
            target_itl_ms, ageing_s = (values.get(f"scheduler.{name}") for name in ("target_itl_ms", "ageing_s"))
            num_seqs, num_tokens, lookahead, self._depth = numbers
            self._limits = Limits(num_seqs, num_tokens, lookahead, _number(target_itl_ms) / 1e3, _number(ageing_s))

    def _hear(self, feedback: OutputFeedback | None) -> None:
        for item in feedback.items if feedback is not None else ():
            request = self._requests.get(item.request_id)
            if request is None:
                continue
            if item.event == "stopped" and item.index < len(request.sequences):
                self._end([request.sequences[item.index]])
            elif item.event == "stored":
                self._end([*request.sequences, *self._copies.pop(item.request_id, ())])
                del self._requests[item.request_id]

    def _end(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            for drive in self._drives.values():
                if drive.state.holds(sequence):
                    drive.state.remove(sequence)
            sequence.status = "finished"

    def _drive(self, executor: str, epoch: int) -> _Drive | None:
        """Return the executor's drive in this epoch; a higher one gives every sequence of the one before back."""
        drive, capacity = self._drives.get(executor), self._capacities.get(executor)
        if drive is not None and epoch <= drive.state.epoch:
            return drive if epoch == drive.state.epoch and not drive.is_over else None
        if capacity is None or self._limits is None:
            return None
        if drive is not None:
            drive.state.abandon()
        state = ExecutorState(
            executor=executor,
            incarnation="",
            epoch=epoch,
            capacity=capacity,
            limits=self._limits,
            depth=self._depth,
        )
        drive = self._drives[executor] = _Drive(state)
        return drive

    def _ask(self, captured: Captured, command: CacheCommand | None) -> None:
        if command is None or (drive := self._drive(command.executor, command.epoch)) is None:
            return
        drive.hear()
        for operation in command.operations:
            if isinstance(operation, Acquire) and operation.sequence > drive.last_number:
                self._admit(drive, operation)
        drive.state.cache_operations()  # what it would have asked is asked
        if captured.reply is not None:
            self._questions[captured.reply] = command

    def _admit(self, drive: _Drive, acquire: Acquire) -> None:
        """Numbers count up; one that was never asked for went to a sequence that had ended before."""
        placeholder = new_request(_nothing(acquire.request_id), None, now_s=0.0).sequences[0]
        for number in range(drive.last_number + 1, acquire.sequence + 1):
            sequence = self._sequence(drive, acquire) if number == acquire.sequence else None
            drive.state.admit(sequence or placeholder)
            if sequence is None:
                drive.state.remove(placeholder)
        drive.last_number = acquire.sequence

    def _sequence(self, drive: _Drive, acquire: Acquire) -> Sequence | None:
        """Return the sequence that was admitted; None for one whose request is gone.

        Which choice of a request it is stands only in the plan that begins it. One that never began (it found no
        blocks, or ended before) is represented by a copy: it can only have stood in the way of others.
        """
        request = self._requests.get(acquire.request_id)
        if request is None:
            return None
        begun = self._begun.get((drive.state.executor, drive.state.epoch, acquire.sequence))
        if begun is None:
            copy = Sequence(
                request, acquire.sequence, list(request.work.prompt_token_ids), request.sequences[0].max_len
            )
            self._copies.setdefault(acquire.request_id, []).append(copy)
            return copy
        sequence = request.sequences[begun.index]
        if sequence.status == "finished":
            return None
        self._take_back(sequence)
        sequence.reset()
        del sequence.tokens[begun.num_tokens :]  # another scheduler knew what the log held
        return sequence

    def _take_back(self, sequence: Sequence) -> None:
        """A sequence that begins elsewhere was given back with its whole epoch."""
        for drive in self._drives.values():
            if drive.state.holds(sequence):
                drive.state.abandon()
                drive.is_over = True

    def _grant(self, captured: Captured, reply: CacheReply | None) -> None:
        """The scheduler may hear it later than the recorder: before the plan that uses it, or the next command."""
        command = self._questions.pop(captured.subject, None)
        if command is None or reply is None:
            return
        if (drive := self._drive(command.executor, command.epoch)) is not None:
            drive.hear()
            drive.unheard = reply
            if not all(grant.granted for grant in reply.grants):
                drive.hear()

    def _apply(self, executor: str, result: StepResult | None) -> None:
        drive = self._drives.get(executor)
        if result is None or drive is None or drive.num_before is None or drive.is_over:
            return
        if result.epoch != drive.state.epoch:
            return
        try:
            drive.state.apply_result(result.model_copy(update={"step": result.step - drive.num_before}))
        except OutOfStep:
            drive.state.abandon()
            drive.is_over = True

    # ---- what is decided again

    def _plan(self, executor: str, recorded: StepPlan | None) -> None:
        if recorded is None:
            return
        drive = self._drive(executor, recorded.epoch)
        if drive is None or not _begins_or_goes_on(drive, recorded):
            self.result.num_skipped += 1
            return
        if drive.is_heard_by(recorded):
            drive.hear()
        self._leave_out(drive, recorded)
        replayed = drive.state.next_plan(recorded.scheduler, 0.0)
        if replayed is not None:
            replayed = replayed.model_copy(update={"step": replayed.step + (drive.num_before or 0)})
        self.result.num_plans += 1
        if replayed is None or _ordered(replayed) != _ordered(recorded):
            self.result.num_different += 1
            if len(self.result.differences) < MAX_KEPT:
                self.result.differences.append(PlanDifference(executor, recorded, replayed))

    def _leave_out(self, drive: _Drive, recorded: StepPlan) -> None:
        """End what ended without a message (a deadline): it is dropped, or would begin and never did."""
        state = drive.state
        for number in recorded.drop:
            if (dropped := state.running.get(number)) is not None:
                state.remove(dropped)
        while True:
            allocations = state.allocate()
            unborn = [
                a.sequence
                for a in allocations
                if not a.sequence.is_known and (state.executor, state.epoch, a.sequence.number) not in self._begun
            ]
            if not unborn:
                return
            for sequence in unborn:
                state.remove(sequence)


def _begins_or_goes_on(drive: _Drive, recorded: StepPlan) -> bool:
    """Tell whether the plan can be made again: a recording that begins within an epoch must find it idle."""
    if drive.num_before is None and not drive.is_over:
        is_idle = {run.sequence for run in recorded.run} == {new.sequence for new in recorded.new}
        drive.num_before = recorded.step - 1 if is_idle and not recorded.drop else None
        drive.is_over = drive.num_before is None
    return not drive.is_over


def _number(value: JsonValue) -> float:
    """Return a setting's value; one that an older scheduler did not have is off."""
    return float(value) if isinstance(value, int | float) else 0.0


def _ordered(plan: StepPlan) -> StepPlan:
    return plan.model_copy(update={"drop": tuple(sorted(plan.drop))})


def _nothing(request_id: str) -> WorkItem:
    """A work item that stands for one whose sequence is gone."""
    output = OutputSpec(request_id=request_id, model="", created_s=0.0, num_prompt_tokens=1)
    return WorkItem(
        request_id=request_id,
        model="",
        created_s=0.0,
        prompt_token_ids=(0,),
        max_tokens=1,
        sampling=SamplingParams(),
        tokenizer="",
        output=output,
    )


def replay_planner(capture: Capture) -> PlannerComparison:
    """Replay every plan of a recording. Raises CaptureError when it holds no plan that can be made again."""
    begun: dict[Place, _Begun] = {}
    for captured in capture.messages():
        if kind_name(captured) == StepPlan.SCHEMA and (plan := message_of(captured, StepPlan)) is not None:
            executor = executor_of(captured.subject)
            begun.update({(executor, plan.epoch, new.sequence): _beginning(new) for new in plan.new})
    replay = PlannerReplay(begun)
    for captured in capture.messages():
        replay.see(captured)
    if replay.result.num_plans == 0:
        raise CaptureError(
            f"{capture.path} holds no plan that can be made again: it needs step_plan, step_result, cache_command, "
            "cache_reply, work_item, registration and effective_config, from a scheduler's beginning on."
        )
    return replay.result


def _beginning(new: NewSequence) -> _Begun:
    return _Begun(new.request_id, new.index, len(new.token_ids))
