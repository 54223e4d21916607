"""One executor as the scheduler drives it: running sequences, leases, plans in flight. Pure: messages in, messages out.

Everything of one epoch lives here. Whatever goes wrong (a lost message, a restarted executor) is repaired the same way:
`abandon` gives the sequences back, and a new epoch begins with them as waiting ones.
"""

import itertools
from collections import deque
from dataclasses import dataclass

from schemas.cache import CacheReply, Grant, OpenPool, Operation
from schemas.control import ExecutorCapacity
from schemas.step import FinishReason, Run, SampledToken, StepPlan, StepResult, TokenLogprob
from services.scheduler.block_keys import naming_of
from services.scheduler.block_leases import BlockLeases
from services.scheduler.message_sizes import fitting
from services.scheduler.pace import Pace
from services.scheduler.planner import Allocation, Limits, plan_step, victim
from services.scheduler.requests import Sequence

TOKENS_PER_ACTIVE = 64
"""What a running sequence weighs against tokens of a prompt when an executor is chosen."""


class OutOfStep(Exception):
    """The executor and this state disagree; a new epoch must begin."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One new token of a sequence and those that it forced, or its end without one."""

    sequence: Sequence
    token: int | None
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    stop_token: bool
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan without an answer; when it comes, so many tokens of each sequence have been computed."""

    step: int
    sent_s: float
    num_computed: dict[int, int]
    num_prompt_tokens: int


class ExecutorState:
    """The plan-ahead loop of one executor in one epoch."""

    def __init__(
        self, *, executor: str, incarnation: str, epoch: int, capacity: ExecutorCapacity, limits: Limits, depth: int
    ) -> None:
        self.executor = executor
        self.incarnation = incarnation
        self.epoch = epoch
        self.capacity = capacity
        self.naming = naming_of(capacity.block_size, capacity.weights_version)
        self.max_len = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)
        self.may_admit = True
        self.load = 0
        self.running: dict[int, Sequence] = {}
        self.num_wasted = 0
        self._limits = limits
        self._depth = depth
        self._pace = Pace(limits.target_itl_s, capacity.block_size, limits.max_num_batched_tokens)
        self._prefill_left: dict[int, int] = {}
        self._acquiring: dict[int, Sequence] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._numbers = itertools.count(1)
        self._next_step = 1
        self._drops: list[int] = []
        self._leases = BlockLeases(capacity, limits, self.naming)
        self.known = self._leases.known

    # ---- sequences in and out

    @property
    def num_active(self) -> int:
        """Sequences that run or wait for their blocks."""
        return len(self.running) + len(self._acquiring)

    def _weigh(self) -> None:
        """Say, after any change, what a router asks of every executor for every request.

        `load` is in tokens of prompt: those not planned yet, as far as is known, and so many for each active sequence.
        `may_admit`: it makes sense to ask for more blocks; not after a refusal, until some come back. `max_len` is
        that of the longest sequence that could run here, alone in the pool.
        """
        num_active = self.num_active
        self.load = sum(self._prefill_left.values()) + num_active * TOKENS_PER_ACTIVE
        self.may_admit = num_active == 0 or (not self._leases.is_full and num_active < self._limits.max_num_seqs)

    def holds(self, sequence: Sequence) -> bool:
        """Tell whether this sequence runs here or is about to."""
        return self.running.get(sequence.number) is sequence or self._acquiring.get(sequence.number) is sequence

    def admit(self, sequence: Sequence) -> None:
        """Let a waiting sequence ask for blocks with the next cache command."""
        sequence.number = next(self._numbers)
        sequence.status = "acquiring"
        self._acquiring[sequence.number] = sequence
        self._prefill_left[sequence.number] = self.num_to_compute(sequence)
        self.known.begin(sequence.prefix_keys(self.naming), sequence.number)
        self._weigh()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing; its blocks go back and the executor forgets it."""
        number = sequence.number
        self._prefill_left.pop(number, None)
        if self.running.pop(number, None) is not None:
            if sequence.is_known:
                self._drops.append(number)
                # It is computed before the drop comes; what was cached needed no computing.
                self.num_wasted += sequence.num_planned - max(sequence.num_computed, sequence.num_cached)
            self._leases.release(sequence)
        elif self._acquiring.pop(number, None) is not None:
            self._leases.release(sequence)
        self._weigh()

    def abandon(self) -> list[Sequence]:
        """End this epoch: return every sequence, ready to wait again."""
        sequences = [*self.running.values(), *self._acquiring.values()]
        self.running.clear()
        self._acquiring.clear()
        self._prefill_left.clear()
        for sequence in sequences:
            sequence.reset()
        self._weigh()
        return sequences

    # ---- plans and results

    @property
    def num_in_flight(self) -> int:
        """Plans that were sent and are not answered."""
        return len(self._in_flight)

    def waiting_since(self) -> float | None:
        """Return when the oldest unanswered plan was sent."""
        return self._in_flight[0].sent_s if self._in_flight else None

    def next_plan(self, scheduler: str, now_s: float) -> StepPlan | None:
        """Return the next step's plan, None when the depth is reached or there is nothing to do."""
        if len(self._in_flight) >= self._depth:
            return None
        allocations = self.allocate()
        if not allocations and not self._drops:
            return None
        new = tuple(a.sequence.to_new_sequence() for a in allocations if not a.sequence.is_known)
        runs = tuple(self._run(allocation.sequence, allocation.num_tokens) for allocation in allocations)
        drops, self._drops = tuple(self._drops), []
        plan = StepPlan(
            scheduler=scheduler,
            epoch=self.epoch,
            step=self._next_step,
            drop=drops,
            copies=self._leases.take_copies(),
            new=new,
            run=runs,
        )
        computed = {allocation.sequence.number: allocation.sequence.num_planned for allocation in allocations}
        num_prompt_tokens = sum(run.num_tokens for run in runs if run.num_tokens > 1)
        self._in_flight.append(_InFlight(self._next_step, now_s, computed, num_prompt_tokens))
        self._next_step += 1
        self._count_prefill_left()
        self._weigh()
        return plan

    def allocate(self) -> list[Allocation]:
        """Return what the next step would run, as things are."""
        longest = self._pace.max_prompt_tokens if self._limits.target_itl_s > 0 else None
        planned = plan_step(self.running.values(), self.capacity.block_size, self._limits, longest)
        return fitting(planned, self._limits.max_plan_bytes)

    def _count_prefill_left(self) -> None:
        """What was estimated at the admission is known once the sequence runs."""
        for number in [number for number in self._prefill_left if number in self.running]:
            sequence = self.running[number]
            if (left := len(sequence.tokens) - sequence.num_planned) > 0:
                self._prefill_left[number] = left
            else:
                del self._prefill_left[number]

    def _run(self, sequence: Sequence, num_tokens: int) -> Run:
        known = sequence.num_sent_blocks if sequence.is_known else len(sequence.blocks)
        blocks = tuple(sequence.blocks[known:])
        sequence.is_known, sequence.num_sent_blocks = True, len(sequence.blocks)
        sequence.plan(num_tokens)
        return Run(sequence=sequence.number, num_tokens=num_tokens, blocks=blocks)

    def apply_result(self, result: StepResult) -> list[Progress]:
        """Take a step's tokens; raises OutOfStep when a message was lost or the executor refused the plan."""
        if result.fault is not None:
            raise OutOfStep(result.fault)
        if not self._in_flight or result.step < self._in_flight[0].step:
            return []
        if result.step != self._in_flight[0].step:
            raise OutOfStep(f"the result of step {self._in_flight[0].step} was lost")
        answered = self._in_flight.popleft()
        self._pace.learn(answered.num_prompt_tokens, result.duration_s)
        for number, num_computed in answered.num_computed.items():
            if number in self.running:
                self.running[number].num_computed = num_computed
        self.num_wasted += result.num_wasted
        progress = [p for sampled in result.sampled if (p := self._accept(sampled)) is not None]
        self._weigh()
        return progress

    def _accept(self, sampled: SampledToken) -> Progress | None:
        sequence = self.running.get(sampled.sequence)
        if sequence is None:
            return None
        if sampled.position != len(sequence.tokens):
            raise OutOfStep(f"a token for position {sampled.position}, expected {len(sequence.tokens)}")
        token = None if sampled.finish_reason == "error" or sampled.token < 0 else sampled.token
        if sampled.prompt_logprobs:
            sequence.prompt_logprobs = sampled.prompt_logprobs
        sequence.embedding = sampled.embedding
        if token is not None:
            sequence.tokens.append(token)
            sequence.num_pending -= 1
            self._follow(sequence, sampled.forced)
            if sampled.logprob is not None:
                sequence.logprobs.append(sampled.logprob)
        if sampled.finish_reason is not None:
            self._finish(sequence, sampled.finish_reason)
        return Progress(sequence, token, sampled.logprob, sampled.finish_reason, sampled.stop_token, sampled.forced)

    def _follow(self, sequence: Sequence, forced: tuple[int, ...]) -> None:
        """Take tokens that the executor runs along with the one before them: no plan counts them."""
        sequence.tokens += forced
        sequence.num_planned += len(forced)
        for step in self._in_flight:
            if sequence.number in step.num_computed:
                step.num_computed[sequence.number] += len(forced)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The executor ended the sequence by itself: it has nothing to drop."""
        del self.running[sequence.number]
        self._prefill_left.pop(sequence.number, None)
        sequence.status, sequence.finish_reason = "finished", reason
        self._leases.release(sequence)

    # ---- leases

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody held when the cache manager last answered."""
        return self._leases.num_free_blocks

    @property
    def num_copies(self) -> int:
        """Block copies that were heard of in this epoch, which every cache command tells."""
        return self._leases.num_copies

    def open_pool(self) -> OpenPool:
        """Return the operation that makes the cache manager know this pool, with the leases held now."""
        return self._leases.open_pool(self.incarnation, self.running.values())

    def cache_operations(self) -> list[Operation]:
        """Return what to ask of the cache manager now; each is asked for once."""
        return self._leases.operations(self.running.values(), self._acquiring.values())

    def num_to_compute(self, sequence: Sequence) -> int:
        """Return, by what is known, how many tokens of a waiting sequence are not cached here."""
        num_held = self.known.num_held(sequence.prefix_keys(self.naming))
        return len(sequence.tokens) - num_held * self.capacity.block_size

    def is_computing_prefix_of(self, sequence: Sequence) -> bool:
        """Tell whether the first block that the sequence lacks is being computed here for another one."""
        return self.known.is_computing(sequence.prefix_keys(self.naming))

    def apply_grants(self, reply: CacheReply) -> tuple[list[Sequence], list[Sequence]]:
        """Take the answer; returns (sequences that may run now, sequences that must wait again).

        A first refusal only ends the look-ahead: a sequence is preempted when not even the next token finds a block.
        """
        leases = self._leases
        leases.hear(reply)
        admitted: list[Sequence] = []
        returned: list[Sequence] = []
        was_full, is_short = leases.is_full, False
        for grant in reply.grants:
            if grant.sequence in self._acquiring:
                sequence = self._acquiring.pop(grant.sequence)
                (admitted if self._begin(sequence, grant) else returned).append(sequence)
            elif grant.sequence in self.running:
                sequence = self.running[grant.sequence]
                sequence.blocks.extend(grant.blocks)
                leases.is_full |= not grant.granted
                is_short |= was_full and not grant.granted and leases.is_starved(sequence)
        if is_short and (lowest := victim(self.running.values(), self._limits)) is not None:
            returned.append(self._preempt(lowest))
        self._weigh()
        return admitted, returned

    def _begin(self, sequence: Sequence, grant: Grant) -> bool:
        if not self._leases.begin(sequence, grant):
            self._prefill_left.pop(grant.sequence, None)
            return False
        self.running[sequence.number] = sequence
        return True

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Free the blocks of one sequence; nothing else is admitted before more come back."""
        self.remove(sequence)
        sequence.reset()
        self._leases.is_full = True
        return sequence
