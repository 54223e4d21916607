"""The path from the queue to the output log without a bus: every part real but the messages, which a seed delays,
loses, doubles and reorders.

One action at a time: something arrives, a message is delivered or lost, a process restarts; then the scheduler decides.
The echo engine keeps its tokens in the blocks it is told to use, so a block with two owners shows as wrong tokens.
"""

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_core.echo import EchoEngine
from engine_core.engine import EngineInfo
from schemas.cache import CacheCommand, Operation
from schemas.errors import Cancelled, NatterjackError, PoolUnknown
from schemas.generation import PRIORITIES
from schemas.output import TokenBatch
from schemas.sampling import SamplingParams
from schemas.step import StepPlan, StepResult
from services.cache_manager.pools import Pools
from services.executor.choosing import mask_of
from services.executor.sequences import PlanRefused, Sequences
from services.scheduler.book import RequestBook, expired
from services.scheduler.executor_state import ExecutorState, OutOfStep, Progress
from services.scheduler.outbox import Outbox
from services.scheduler.planner import Limits
from services.scheduler.requests import Request, Sequence, new_request
from tests.unit.scheduler.scheduling_traffic import capacity, work

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
LONGEST = 64
"""Tokens; after a loss all are computed again in small steps, and must be before the next loss."""
TOKEN_S = 0.001
"""What an engine is said to take for each token."""
STEP_TIMEOUT = 200
"""Actions after which the scheduler gives an unanswered step up."""


@dataclass(slots=True)
class Faults:
    """Chances, per action, of what goes wrong."""

    loss: float = 0.0
    executor_restart: float = 0.0
    cache_restart: float = 0.0


@dataclass(slots=True)
class Written:
    """One request's output as a tokenizer writes it: tokens and end of each choice, or the error."""

    epoch: int
    tokens: list[list[int]]
    ends: list[str | None]
    error: str | None = None

    @property
    def is_final(self) -> bool:
        return self.error is not None or all(end is not None for end in self.ends)


@dataclass(slots=True)
class Job:
    """What a request must come to: `expected` are all tokens of each choice unless cut at `stop_at` or cancelled."""

    request: Request
    expected: list[int]
    stop_at: int | None
    num_ended: int = 0
    may_fail: bool = False


@dataclass(slots=True)
class ForcingGrammar:
    """Allows only the expected token in some places, and every token in the others."""

    expected: list[int | None]
    num_tokens: int = 0
    is_broken: bool = False
    is_complete: bool = False

    def advance(self, generated: list[int]) -> None:
        self.num_tokens = len(generated)

    def mask(self) -> bytes:
        token = self.expected[self.num_tokens] if self.num_tokens < len(self.expected) else None
        return bytes([255]) * (VOCAB_SIZE // 8) if token is None else mask_of((token,))


class ForcingGrammars:
    """Reads what `forcing_grammar` writes."""

    def begin(self, source: str) -> ForcingGrammar:
        return ForcingGrammar(json.loads(source))


def forcing_grammar(expected: list[int], chance: float) -> str:
    """The same places for the same tokens, wherever a sequence is continued."""
    places = random.Random(f"{expected}{chance}")
    return json.dumps([token if places.random() < chance else None for token in expected])


@dataclass(slots=True)
class Driver:
    """One executor, and the scheduler's side of it."""

    name: str
    num_blocks: int
    num_host_blocks: int
    limits: Limits
    depth: int
    state: ExecutorState | None = None
    incarnation: int = 1
    seen_incarnation: int = 0
    is_open: bool = False
    command: list[Operation] | None = None
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    sequences: Sequences = field(default_factory=Sequences)
    engine: EchoEngine | None = None

    def boot(self) -> None:
        info = EngineInfo(
            name="echo",
            model="echo",
            vocab_size=VOCAB_SIZE,
            max_model_len=10_000,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            device="none",
            kernels="none",
        )
        self.engine = EchoEngine(info, 0.0)
        self.sequences = Sequences(grammars=ForcingGrammars(), block_size=BLOCK_SIZE)  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> None:
        """Do what the engine thread does with one plan."""
        assert self.engine is not None
        try:
            rows = self.sequences.begin(plan, 0.0)
        except PlanRefused as refused:
            self.results.append(StepResult(executor="", epoch=plan.epoch, step=plan.step, fault=str(refused)))
            return
        if rows is not None:
            self.engine.copy_blocks(plan.copies)
            sampled = self.engine.step(rows) if rows else []
            result = self.sequences.finish(plan, sampled, 0.0)
            duration_s = TOKEN_S * sum(len(row.tokens) for row in rows)
            self.results.append(result.model_copy(update={"duration_s": duration_s}))


class SimulatedPath:
    """Requests, scheduler, executors, cache manager and a tokenizer, driven by one seed."""

    def __init__(
        self,
        seed: int,
        *,
        num_executors: int,
        num_blocks: int,
        depth: int,
        faults: Faults,
        lookahead: int = 8,
        num_host_blocks: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        limits = Limits(
            max_num_seqs=4,
            max_num_batched_tokens=self.random.choice([3, 8, 64]),
            lookahead_tokens=lookahead,
            target_itl_s=self.random.choice([0.0, 5 * TOKEN_S, 20 * TOKEN_S]),
            ageing_s=self.random.choice([0.0, 100.0]),
        )
        self.limits = limits
        self.drivers = [
            Driver(f"executor-{i}", num_blocks, num_host_blocks, limits, depth) for i in range(num_executors)
        ]
        for driver in self.drivers:
            driver.boot()
        self.pools = Pools()
        self.book = RequestBook(limits.ageing_s)
        self.outbox = Outbox("scheduler-0")
        self.batches: deque[TokenBatch] = deque()
        self.jobs: dict[str, Job] = {}
        self.written: dict[str, Written] = {}
        self.now = 0
        self.num_forced = 0
        self.forcing = (0.0, 0.2, 0.7, 1.0)
        self.num_epochs = 0
        self.num_preempted = 0
        self.num_loaded = 0
        self.repeats = 0.0
        """The chance that a prompt goes on where an earlier one ended."""

    # ---- what may happen

    def arrive(self) -> None:
        rng = self.random
        longest = min(self.drivers[0].num_blocks * BLOCK_SIZE, LONGEST)
        prompt_len = rng.choice([1, 3, 4, 5, 7, 8, 9, 16, rng.randint(1, 24)])
        max_tokens = rng.choice([1, 2, 3, 4, rng.randint(1, max(1, longest - prompt_len))])
        max_tokens = max(1, min(max_tokens, longest - prompt_len))
        prompt = tuple(rng.randint(1, 50) for _ in range(prompt_len))
        if self.repeats and self.jobs and rng.random() < self.repeats:
            earlier = rng.choice(list(self.jobs.values())).request.work.prompt_token_ids
            prompt = (*earlier, *prompt)[: max(longest - max_tokens, 1)]
            prompt_len = len(prompt)
        stops = (rng.randint(1, 50),) if rng.random() < 0.3 else ()
        min_tokens = rng.randint(0, max_tokens) if stops else 0
        chance = rng.choice(self.forcing)
        grammar = forcing_grammar(expected_tokens(prompt, max_tokens, stops, min_tokens), chance) if chance else ""
        item = work(
            f"r{len(self.jobs)}",
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            n=rng.randint(1, 3),
            prompt_token_ids=prompt,
            priority=rng.choice(PRIORITIES),
            created_s=float(self.now),
            stop_token_ids=stops,
            deadline_s=self.now + rng.randint(10, 400) if rng.random() < 0.05 else None,
            sampling=SamplingParams(temperature=0.0, min_tokens=min_tokens, grammar=grammar),
        )
        request = new_request(item, None, now_s=self.now)
        expected = expected_tokens(prompt, max_tokens, stops, min_tokens)
        stop_at = rng.randint(1, len(expected)) if rng.random() < 0.2 else None
        job = self.jobs[item.request_id] = Job(request, expected, stop_at, may_fail=item.deadline_s is not None)
        if rng.random() < 0.03:
            self.book.remember_cancelled(item.request_id, self.now)
            job.may_fail = True
        if (error := self.book.add(request, self.now)) is not None:
            self.fail(request, error)

    def submit(self, priority: str, *, max_tokens: int) -> None:
        """One plain request; the first of a priority has its name."""
        name = priority if priority not in self.jobs else f"r{len(self.jobs)}"
        prompt = (1, 2, 3)
        item = work(
            name,
            prompt_len=3,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            priority=priority,
            created_s=float(self.now),
            cache_salt=name,
        )
        request = new_request(item, None, now_s=self.now)
        self.jobs[name] = Job(request, expected_tokens(prompt, max_tokens, (), 0), None)
        self.book.add(request, self.now)

    def cancel(self) -> None:
        running = [r for r in self.book if not r.is_finished]
        if running:
            request = self.random.choice(running)
            self.jobs[request.work.request_id].may_fail = True
            self.fail(request, Cancelled("The request was cancelled."))

    def is_lost(self) -> bool:
        return self.random.random() < self.faults.loss

    def deliver_plan(self, driver: Driver) -> None:
        if self.is_lost() and len(driver.plans) > 1:
            driver.plans.rotate(1)  # out of order
        plan = driver.plans.popleft()
        if self.is_lost():
            return
        for _ in range(1 + self.is_lost()):
            driver.run(plan)

    def deliver_result(self, driver: Driver) -> None:
        if self.is_lost() and len(driver.results) > 1:
            driver.results.rotate(1)
        result = driver.results.popleft()
        if self.is_lost():
            return
        for _ in range(1 + self.is_lost()):
            self.hear_result(driver, result)

    def hear_result(self, driver: Driver, result: StepResult) -> None:
        state = driver.state
        if state is None or result.epoch != state.epoch:
            return
        try:
            progress = state.apply_result(result)
        except OutOfStep:
            self.give_up(driver)
            return
        for item in progress:
            assert item.finish_reason != "error", "the engine read a slot that was never written"
            self.num_forced += len(item.forced)
            self.add_progress(item)

    def add_progress(self, item: Progress) -> None:
        if item.sequence.request.error is None:
            self.outbox.add(item)

    def deliver_command(self, driver: Driver) -> None:
        """One exchange with the cache manager; the command stays until an answer has come."""
        state, operations = driver.state, driver.command
        assert state is not None
        assert operations is not None
        opening: list[Operation] = [] if driver.is_open else [state.open_pool()]
        command = CacheCommand(
            scheduler="scheduler-0",
            executor=driver.name,
            epoch=state.epoch,
            operations=tuple(opening + operations),
            num_copies=state.num_copies,
        )
        if self.is_lost():
            return
        try:
            reply = self.pools.apply(command)
        except PoolUnknown:
            driver.is_open = False
            return
        if self.is_lost():
            return
        driver.command, driver.is_open = None, True
        _, returned = state.apply_grants(reply)
        self.num_loaded += sum(grant.num_loaded for grant in reply.grants)
        self.book.wait(returned)
        self.num_preempted += sum(bool(s.num_generated) for s in returned)

    def deliver_batch(self) -> None:
        batch = self.batches.popleft()
        if not self.is_lost():
            self.write(batch)

    def restart_executor(self) -> None:
        driver = self.random.choice(self.drivers)
        driver.boot()
        driver.incarnation += 1
        driver.plans.clear()

    def notice(self) -> None:
        """What the regular check finds: restarted executors, unanswered steps, deadlines, silent outputs."""
        for driver in self.drivers:
            since = driver.state.waiting_since() if driver.state is not None else None
            is_new = driver.incarnation != driver.seen_incarnation
            if driver.state is None or is_new or (since is not None and self.now - since > STEP_TIMEOUT):
                self.begin(driver)
        for request in self.book:
            if not request.is_finished and (error := expired(request, self.now)) is not None:
                self.fail(request, error)
            elif request.is_finished and self.now - request.quiet_since_s > STEP_TIMEOUT:
                request.quiet_since_s = self.now
                self.outbox.reopen(request)

    # ---- the scheduler's edge

    def give_up(self, driver: Driver) -> None:
        driver.command = None
        if driver.state is not None:
            self.book.wait(driver.state.abandon())
            driver.state = None

    def begin(self, driver: Driver) -> None:
        self.give_up(driver)
        self.num_epochs += 1
        driver.seen_incarnation, driver.is_open = driver.incarnation, False
        driver.state = ExecutorState(
            executor=driver.name,
            incarnation=str(driver.incarnation),
            epoch=self.num_epochs,
            capacity=capacity(driver.num_blocks, block_size=BLOCK_SIZE, num_host_blocks=driver.num_host_blocks),
            limits=driver.limits,
            depth=driver.depth,
        )

    def fail(self, request: Request, error: NatterjackError) -> None:
        request.error, request.quiet_since_s = error, self.now
        for sequence in request.sequences:
            self.end(sequence)
        self.outbox.fail(request)

    def end(self, sequence: Sequence) -> None:
        for driver in self.drivers:
            if driver.state is not None and driver.state.holds(sequence):
                driver.state.remove(sequence)
        sequence.status = "finished"

    def tick(self) -> None:
        states = [driver.state for driver in self.drivers if driver.state is not None]
        self.book.assign(states, self.limits, self.fail)
        for driver in self.drivers:
            if driver.state is None:
                continue
            if driver.command is None:
                operations = driver.state.cache_operations()
                driver.command = operations if operations or not driver.is_open else None
            while (plan := driver.state.next_plan("scheduler-0", self.now)) is not None:
                driver.plans.append(plan)
        self.batches.extend(batch for _, batch in self.outbox.take())

    # ---- the tokenizer

    def write(self, batch: TokenBatch) -> None:
        for opened in batch.opened:
            spec = opened.spec
            known = self.written.get(spec.request_id)
            if known is None:
                self.written[spec.request_id] = Written(opened.epoch, [[] for _ in range(spec.n)], [None] * spec.n)
            else:
                assert opened.resume
                known.epoch = max(known.epoch, opened.epoch)
                if known.is_final and known.epoch == opened.epoch:
                    self.stored(spec.request_id, opened.epoch)
        for news in batch.tokens:
            written = self.written.get(news.request_id)
            if written is None or written.epoch < news.epoch:
                self.lost(news.request_id, news.epoch)
            elif written.epoch == news.epoch and not written.is_final and written.ends[news.index] is None:
                tokens = written.tokens[news.index]
                if news.start > len(tokens):
                    self.lost(news.request_id, news.epoch)
                    continue
                fresh = news.token_ids[len(tokens) - news.start :]
                self.extend(written, news.request_id, news.index, fresh, news.finish_reason)
        for failure in batch.failed:
            written = self.written.get(failure.request_id)
            if written is None:
                self.lost(failure.request_id, failure.epoch)
            elif written.epoch == failure.epoch and not written.is_final:
                written.error = failure.error.code
                self.stored(failure.request_id, failure.epoch)

    def extend(
        self, written: Written, request_id: str, index: int, fresh: tuple[int, ...], finish_reason: str | None
    ) -> None:
        job, tokens = self.jobs[request_id], written.tokens[index]
        tokens.extend(fresh)
        assert tokens == job.expected[: len(tokens)], f"{request_id}: {tokens} is not the beginning of {job.expected}"
        if job.stop_at is not None and len(tokens) >= job.stop_at:
            del tokens[job.stop_at :]
            written.ends[index] = "stop string"
            if not self.is_lost() and (request := self.book.get(request_id)) is not None:
                self.end(request.sequences[index])
                request.quiet_since_s = self.now
        elif finish_reason is not None:
            written.ends[index] = finish_reason
        if written.is_final:
            self.stored(request_id, written.epoch)

    def stored(self, request_id: str, epoch: int) -> None:
        """The final chunk is in the log: the scheduler hears of it, or not."""
        request = self.book.get(request_id)
        if request is None or request.epoch != epoch or self.is_lost():
            return
        for sequence in request.sequences:
            self.end(sequence)
        self.book.remove(request)
        self.jobs[request_id].num_ended += 1

    def lost(self, request_id: str, epoch: int) -> None:
        request = self.book.get(request_id)
        if request is not None and request.epoch == epoch:
            self.outbox.reopen(request)

    # ---- running

    def actions(self) -> list[Callable[[], None]]:
        """Everything that can be delivered now."""
        enabled: list[Callable[[], None]] = [self.deliver_batch] if self.batches else []
        for driver in self.drivers:
            if driver.plans:
                enabled.append(lambda driver=driver: self.deliver_plan(driver))
            if driver.results:
                enabled.append(lambda driver=driver: self.deliver_result(driver))
            if driver.command is not None:
                enabled.append(lambda driver=driver: self.deliver_command(driver))
        return enabled

    def act(self, *, arrival: float) -> bool:
        """Do one thing, then let the scheduler decide; False when nothing was to be done."""
        self.now += 1
        rng, enabled = self.random, self.actions()
        if rng.random() < arrival:
            self.arrive()
        elif arrival and rng.random() < arrival / 8:
            self.cancel()
        elif rng.random() < self.faults.executor_restart:
            self.restart_executor()
        elif rng.random() < self.faults.cache_restart:
            self.pools = Pools()
        elif enabled:
            rng.choice(enabled)()
        if self.now % 16 == 0:
            self.notice()
        self.tick()
        self.check()
        return bool(enabled)

    def check(self) -> None:
        """A block has two owners only for the same prefix, and none that the cache manager would give away."""
        for driver in self.drivers:
            state = driver.state
            if state is None:
                continue
            prefixes: dict[int, list[int]] = {}
            for s in state.running.values():
                for number, block in enumerate(s.blocks, start=1):
                    prefix = s.tokens[: number * BLOCK_SIZE]
                    assert prefixes.setdefault(block, prefix) == prefix, f"{driver.name}: a block has two owners"
            owned = self.pools._pools.get(driver.name)
            if owned is None or owned.epoch != state.epoch or not driver.is_open:
                continue
            for number, s in state.running.items():
                leased = owned.pool.blocks_of(number)
                assert leased[: len(s.blocks)] == tuple(s.blocks), f"{driver.name}: the lease of {number} differs"

    def finish(self, max_actions: int) -> int:
        """Let everything come to its end; returns how many actions that took."""
        for count in range(max_actions):
            is_busy = self.act(arrival=0.0)
            is_idle = all(d.state is not None and not d.state.num_in_flight for d in self.drivers)
            if is_idle and not is_busy and not self.book.requests:
                return count
        raise AssertionError(f"hangs: {list(self.book.requests)} after {max_actions} actions")


def expected_tokens(prompt: tuple[int, ...], max_tokens: int, stops: tuple[int, ...], min_tokens: int) -> list[int]:
    """What the echo engine says: the prompt again and again, no stop token before `min_tokens`."""
    tokens: list[int] = []
    for number in range(max_tokens):
        said = prompt[number % len(prompt)]
        if number < min_tokens:
            while said in stops:
                said = (said + 1) % VOCAB_SIZE
        tokens.append(said)
        if said in stops:
            break
    return tokens
