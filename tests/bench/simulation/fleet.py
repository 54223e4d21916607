"""The events: requests come, plans and commands are sent, answers are heard, executors die. The decisions are real."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import thread_time

from schemas.cache import CacheCommand, Operation
from schemas.control import ExecutorCapacity
from schemas.errors import NatterjackError
from schemas.generation import OutputSpec, WorkItem
from schemas.sampling import SamplingParams
from schemas.step import StepResult
from services.cache_manager.pools import Pools
from services.scheduler.book import RequestBook
from services.scheduler.executor_state import ExecutorState, Progress
from services.scheduler.planner import Limits
from services.scheduler.requests import Request, Sequence, new_request
from tests.bench.simulation.executor import SimulatedExecutor, Timing
from tests.bench.simulation.trace_shape import Conversation, Trace

SCHEDULER = "scheduler-0"
DETECTION_S = 3.0
"""From an executor's death until the scheduler gives its requests to others."""
COMPARED = (5, 8)
"""Steps with so many running sequences are compared early and late in the run."""


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How many executors there are, and what each can hold."""

    num_executors: int
    num_blocks: int = 2048
    block_size: int = 16
    depth: int = 2
    limits: Limits = Limits(32, 512, 32, target_itl_s=0.1, ageing_s=60.0)
    timing: Timing = Timing()


@dataclass(slots=True)
class Costs:
    """Seconds of decisions, by their number: what one costs."""

    num: int = 0
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.num += 1
        self.total_s += seconds

    @property
    def mean_us(self) -> float:
        return self.total_s / self.num * 1e6 if self.num else 0.0


@dataclass(slots=True)
class Seat:
    """One executor and the scheduler's side of it."""

    executor: SimulatedExecutor
    state: ExecutorState
    is_open: bool = False
    is_asking: bool = False


@dataclass(slots=True)
class Record:
    """What became of one request; times are of the simulation."""

    conversation: int
    turn: int
    arrived_s: float
    num_prompt_tokens: int
    num_cached: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    num_ends: int = 0
    executor: str = ""
    is_sticky: bool = False


@dataclass(slots=True)
class Measured:
    """What the run costs: routing by request, planning and block bookkeeping by step."""

    routing: Costs = field(default_factory=Costs)
    planning: Costs = field(default_factory=Costs)
    bookkeeping: Costs = field(default_factory=Costs)
    step_by_running: dict[int, Costs] = field(default_factory=dict)
    step_by_finished: dict[int, Costs] = field(default_factory=dict)


class SimulatedFleet:
    """Runs one trace on one fleet."""

    def __init__(self, shape: FleetShape, trace: Trace) -> None:
        self.shape = shape
        self.now_s = 0.0
        self.records: dict[str, Record] = {}
        self.measured = Measured()
        self.most_active = 0
        self._trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._book = RequestBook(shape.limits.ageing_s)
        self._pools = Pools()
        self._epochs = itertools.count(1)
        self._seats: dict[str, Seat] = {}
        self._states: list[ExecutorState] = []
        self._conversations: dict[str, Conversation] = {}
        self._num_finished = 0
        self._step_s = 0.0
        self._busy: dict[float, float] = {}
        for number in range(shape.num_executors):
            self.join(f"executor-{number:04d}")

    # ---- executors

    def join(self, name: str) -> None:
        """An executor is there."""
        shape = self.shape
        capacity = ExecutorCapacity(
            engine="echo",
            model_file="echo",
            device="none",
            kernels="none",
            vocab_size=50_000,
            max_model_len=8192,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
        )
        state = ExecutorState(
            executor=name,
            incarnation="1",
            epoch=next(self._epochs),
            capacity=capacity,
            limits=shape.limits,
            depth=shape.depth,
        )
        self._seats[name] = Seat(SimulatedExecutor(name, shape.timing), state)
        self._states.append(state)

    def join_at(self, when_s: float, name: str) -> None:
        """An executor comes later."""

        def come() -> None:
            self.join(name)
            self._assign()

        self._at(when_s, come)

    def kill_at(self, when_s: float, name: str) -> None:
        """An executor dies without a word."""

        def die() -> None:
            self._seats[name].executor.is_alive = False
            self._at(self.now_s + DETECTION_S, lambda: self._notice_death(name))

        self._at(when_s, die)

    def _notice_death(self, name: str) -> None:
        seat = self._seats.pop(name)
        self._states.remove(seat.state)
        self._pools.forget(name)
        self._book.wait(seat.state.abandon())
        self._assign()

    def busy_until(self, when_s: float) -> float:
        """Return the seconds that all executors together had computed then, as far as steps have been heard."""
        return sum(seconds for end_s, seconds in self._busy.items() if end_s <= when_s)

    @property
    def executors(self) -> list[SimulatedExecutor]:
        """All that are known to live."""
        return [seat.executor for seat in self._seats.values()]

    # ---- time

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def run(self) -> None:
        """Play the whole trace until every request has ended."""
        beginnings = self._trace.beginnings()
        self._begin_next(beginnings)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _begin_next(self, beginnings: Iterable[tuple[float, Conversation]]) -> None:
        when_s, conversation = next(iter(beginnings))

        def begin() -> None:
            self._ask(conversation)
            if len(self.records) < self._trace.shape.num_requests:
                self._begin_next(beginnings)

        self._at(when_s, begin)

    # ---- requests

    def _ask(self, conversation: Conversation) -> None:
        """A conversation's next turn reaches the scheduler."""
        if len(self.records) >= self._trace.shape.num_requests:
            return
        name = f"c{conversation.number}-{conversation.num_turns}"
        prompt = tuple(conversation.tokens)
        output = OutputSpec(request_id=name, model="smol", created_s=self.now_s, num_prompt_tokens=len(prompt))
        work = WorkItem(
            request_id=name,
            model="smol",
            created_s=self.now_s,
            prompt_token_ids=prompt,
            max_tokens=conversation.answer_len,
            sampling=SamplingParams(),
            tokenizer="tokenizer-0",
            output=output,
        )
        self.records[name] = Record(conversation.number, conversation.num_turns, self.now_s, len(prompt))
        self._conversations[name] = conversation
        self._book.add(new_request(work, None, now_s=self.now_s), self.now_s)
        self._assign()

    def _assign(self) -> None:
        began = thread_time()
        given = self._book.assign(self._states, self.shape.limits, _refuse)
        if given:
            self.measured.routing.add(thread_time() - began)
        for state in given:
            self.most_active = max(self.most_active, state.num_active)
            self._serve(self._seats[state.executor])

    def _progress(self, seat: Seat, progress: list[Progress]) -> None:
        for item in progress:
            if item.sequence.num_generated == 1:
                self._has_begun(seat, item.sequence)
            if item.finish_reason is not None:
                self._has_ended(item.sequence)

    def _has_begun(self, seat: Seat, sequence: Sequence) -> None:
        record = self.records[sequence.request.work.request_id]
        if record.first_token_s is None:
            conversation = self._conversations[sequence.request.work.request_id]
            record.first_token_s, record.num_cached = self.now_s, sequence.num_cached
            record.executor = seat.executor.name
            record.is_sticky = bool(conversation.executors) and conversation.executors[-1] == seat.executor.name
            conversation.executors.append(seat.executor.name)

    def _has_ended(self, sequence: Sequence) -> None:
        name = sequence.request.work.request_id
        record, conversation = self.records[name], self._conversations.pop(name)
        record.ended_s = self.now_s
        record.num_ends += 1
        self._num_finished += 1
        self._book.remove(sequence.request)
        pause_s = self._trace.goes_on_after_s()
        if pause_s is None or len(self.records) >= self._trace.shape.num_requests:
            return
        conversation.tokens = list(sequence.tokens)
        self._trace.say(conversation)
        self._at(self.now_s + pause_s, lambda: self._ask(conversation))

    # ---- the scheduler's side of one executor

    def _serve(self, seat: Seat) -> None:
        """Ask the cache manager and send plans, as the service does after every message."""
        began = thread_time()
        state = seat.state
        if not seat.is_asking:
            operations = state.cache_operations()
            if operations or not seat.is_open:
                self._command(seat, operations)
        while (plan := state.next_plan(SCHEDULER, self.now_s)) is not None:
            self._step_s += thread_time() - began
            heard_s, result = seat.executor.run(plan, self.now_s)
            self._at(heard_s, lambda result=result: self._hear(seat, result))
            began = thread_time()
        self._step_s += thread_time() - began

    def _command(self, seat: Seat, operations: list[Operation]) -> None:
        began = thread_time()
        opening: list[Operation] = [] if seat.is_open else [seat.state.open_pool()]
        name, epoch = seat.executor.name, seat.state.epoch
        command = CacheCommand(scheduler=SCHEDULER, executor=name, epoch=epoch, operations=(*opening, *operations))
        seat.is_asking = seat.is_open = True
        reply = self._pools.apply(command)
        spent_s = thread_time() - began
        self.measured.bookkeeping.add(spent_s)
        self._step_s -= spent_s

        def hear() -> None:
            if name not in self._seats or not seat.executor.is_alive:
                return
            seat.is_asking = False
            _, returned = seat.state.apply_grants(reply)
            if returned:
                self._book.wait(returned)
            self._assign()
            self._serve(seat)

        self._at(self.now_s + 2 * self.shape.timing.hop_s, hear)

    def _hear(self, seat: Seat, result: StepResult) -> None:
        if not seat.executor.is_alive:
            return
        self._step_s = 0.0
        self._busy[round(self.now_s, 1)] = self._busy.get(round(self.now_s, 1), 0.0) + result.duration_s
        began = thread_time()
        num_running = len(seat.state.running)
        progress = seat.state.apply_result(result)
        self._step_s += thread_time() - began
        self._progress(seat, progress)
        self._assign()
        self._serve(seat)
        self._count_step(num_running)

    def _count_step(self, num_running: int) -> None:
        measured = self.measured
        measured.planning.add(self._step_s)
        measured.step_by_running.setdefault(num_running, Costs()).add(self._step_s)
        if COMPARED[0] <= num_running <= COMPARED[1]:
            tenth = self._num_finished * 10 // self._trace.shape.num_requests
            measured.step_by_finished.setdefault(tenth, Costs()).add(self._step_s / num_running)

    def check_nothing_is_left(self) -> None:
        """Every request has ended once, and every block is free; raises AssertionError."""
        assert self._num_finished == len(self.records)
        assert all(record.num_ends == 1 for record in self.records.values())
        assert not self._book.requests
        for seat in self._seats.values():
            assert seat.state.num_active == seat.state.num_in_flight == 0
        usage = self._pools.usage()
        assert usage["num_free_blocks"] == usage["num_blocks"]


def _refuse(request: Request, error: NatterjackError) -> None:
    raise AssertionError(f"{request.work.request_id} was refused: {error.message}")
