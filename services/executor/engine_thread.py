"""The one thread that loads the engine and runs every step for the life of the process.

A second thread that touched the native kernels would create a second thread team and slow every later step, so the
engine is never seen outside of this file. Plans come in through a bounded queue; results go out through a callback.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine_core.batch import Row
from engine_core.engine import Engine, EngineConfig, EngineInfo, load_engine
from engine_core.grammar import Grammars
from engine_core.token_bytes import read_token_bytes
from schemas.step import StepPlan, StepResult
from services.executor.sequences import Answer, Ended, Hidden, PlanRefused, Sequences

log = logging.getLogger(__name__)

MAX_QUEUED_PLANS = 64
NUM_KEPT_RESULTS = 16
"""More than any scheduler has in flight: a plan that comes again is answered with what was lost."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step's result, the sequences that left with it, and whether it ran prompts, single tokens or both."""

    result: StepResult
    ended: list[Ended]
    phase: str = "decode"


@dataclass(frozen=True, slots=True)
class Events:
    """Callbacks of the thread; they run in it and only hand off."""

    progress: Callable[[str, float], None]
    loaded: Callable[[EngineInfo], None]
    stepped: Callable[[StepOutcome], None]
    failed: Callable[[BaseException], None]


class EngineThread:
    """Loads one engine, then runs plans in the order in which they come."""

    def __init__(self, engine: str, config: EngineConfig, events: Events, *, append_forced_tokens: bool = True) -> None:
        self._engine_name = engine
        self._append_forced_tokens = append_forced_tokens
        self._config = config
        self._events = events
        self._plans: queue.Queue[StepPlan | None] = queue.Queue(MAX_QUEUED_PLANS)
        self._sequences = Sequences()
        self._answered: deque[StepResult] = deque(maxlen=NUM_KEPT_RESULTS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, plan: StepPlan) -> bool:
        """Queue a plan; False when the queue is full, which only a misbehaving scheduler can cause."""
        try:
            self._plans.put_nowait(plan)
        except queue.Full:
            return False
        return True

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine holds."""
        return len(self._sequences.running)

    def stop(self, timeout_s: float) -> None:
        """End after the running step."""
        try:
            self._plans.put_nowait(None)
        except queue.Full:
            log.warning("the engine thread is busy; it ends with the process")
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            engine = load_engine(self._engine_name, self._config, self._events.progress)
            self._events.progress("warming up", 0.0)
            engine.warm_up()
            self._sequences.block_size = engine.info.block_size if self._append_forced_tokens else 0
            self._sequences.grammars = Grammars(partial(read_token_bytes, self._config.model_path))
            self._events.loaded(engine.info)
            while (waiting := self._next()) is not None:
                self._step(engine, *waiting)
        except BaseException as error:
            self._events.failed(error)

    def _next(self) -> tuple[StepPlan, float] | None:
        started = time.perf_counter()
        plan = self._plans.get()
        return None if plan is None else (plan, time.perf_counter() - started)

    def _step(self, engine: Engine, plan: StepPlan, idle_s: float) -> None:
        try:
            rows = self._sequences.begin(plan, time.time())
        except PlanRefused as refused:
            fault = StepResult(executor="", epoch=plan.epoch, step=plan.step, fault=str(refused))
            self._events.stepped(StepOutcome(fault, []))
            return
        if rows is None:
            self._answer_again(plan)
            return
        started = time.perf_counter()
        engine.copy_blocks(plan.copies)
        sampled = _run(engine, rows)
        duration_s = time.perf_counter() - started
        result = self._sequences.finish(plan, sampled, time.time())
        result = result.model_copy(update={"duration_s": duration_s, "idle_s": idle_s})
        self._answered.append(result)
        self._events.stepped(StepOutcome(result, self._sequences.take_ended(), _phase(rows)))

    def _answer_again(self, plan: StepPlan) -> None:
        for result in self._answered:
            if (result.epoch, result.step) == (plan.epoch, plan.step):
                self._events.stepped(StepOutcome(result, []))


def _run(engine: Engine, rows: list[Row]) -> list[Answer]:
    """Run a step's rows: those that are scored each alone, those that are embedded together, the others together."""
    others = [row for row in rows if row.scoring is None and row.hidden is None]
    sampled = iter(engine.step(others) if others else ())
    embedded = [row for row in rows if row.hidden is not None]
    hidden = iter(_hidden_states(engine, embedded) if embedded else ())
    return [
        engine.score(row) if row.scoring is not None else next(sampled) if row.hidden is None else next(hidden)
        for row in rows
    ]


def _hidden_states(engine: Engine, rows: list[Row]) -> list[Hidden]:
    """An engine that has none gives no values, by which the sequence fails; the others do not suffer from it."""
    if not engine.info.embedding_size:
        return [np.empty((len(row.tokens), 0), dtype=np.float32) for row in rows]
    return engine.hidden_states(rows)


def _phase(rows: list[Row]) -> str:
    num_prompts = sum(row.start < row.prompt_len for row in rows)
    return "decode" if num_prompts == 0 else "prefill" if num_prompts == len(rows) else "mixed"
