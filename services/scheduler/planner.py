"""What to run next: pure functions of the waiting and running sequences, the budget and the room. No clock, no bus.

Continuous batching with chunked prefill under one token budget per step, decodes first (Sarathi-Serve,
arXiv:2403.02310). Priorities are strict, but a request that waits rises: one class in each `ageing_s`, so that none
starves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.generation import PRIORITIES
from services.scheduler.requests import Sequence

Rank = tuple[float, int, float, str, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one executor is given at most, and by which rules.

    `target_itl_s`: how long a step that holds decodes should take, 0 for no target. `ageing_s`: the wait that is worth
    one priority class, 0 for none. `max_plan_bytes`: what of new sequences one plan may hold, 0 for no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    lookahead_tokens: int
    target_itl_s: float = 0.0
    ageing_s: float = 0.0
    max_plan_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tokens of one sequence to run in the next step."""

    sequence: Sequence
    num_tokens: int


def rank_of(sequence: Sequence, ageing_s: float) -> Rank:
    """Sort key: priority, then first come. With ageing, a class is worth so many seconds of having come earlier.

    That is what raising a waiting request one class per `ageing_s` comes to, without a clock: of two requests, the
    order never changes. So a preempted request does not overtake, and a replay needs no times.
    """
    work = sequence.request.work
    priority = PRIORITIES.index(work.priority)
    due_s = work.created_s + priority * ageing_s if ageing_s > 0 else 0.0
    return due_s, priority, work.created_s, work.request_id, sequence.index


def plan_step(
    running: Iterable[Sequence], block_size: int, limits: Limits, max_prompt_tokens: int | None = None
) -> list[Allocation]:
    """Return the next step's work: one token of every decoding sequence, then prompt chunks, in order of rank.

    Beside decodes, prompts get `max_prompt_tokens` at most: who decodes has to wait for them. A sequence whose lease
    does not cover its next token is left out until it is extended.
    """
    ordered = sorted(
        ((sequence.num_to_run, sequence) for sequence in running),
        key=lambda item: (item[0] > 1, rank_of(item[1], limits.ageing_s)),
    )
    budget = limits.max_num_batched_tokens
    has_decodes = False
    allocations: list[Allocation] = []
    for num_to_run, sequence in ordered:
        if num_to_run > 1 and has_decodes and max_prompt_tokens is not None:
            budget, has_decodes = min(budget, max_prompt_tokens), False  # prompts only, from here on
        covered = len(sequence.blocks) * block_size - sequence.num_planned
        num_tokens = min(num_to_run, covered, budget)
        if num_tokens > 0:
            allocations.append(Allocation(sequence, num_tokens))
            budget -= num_tokens
            has_decodes |= num_to_run <= 1
    return allocations


def to_extend(running: Iterable[Sequence], block_size: int, limits: Limits) -> list[Sequence]:
    """Return the running sequences whose lease ends within half of the look-ahead."""
    margin = max(1, limits.lookahead_tokens // 2)
    return [s for s in running if len(s.blocks) * block_size < s.num_to_cover(margin)]


def victim(running: Iterable[Sequence], limits: Limits) -> Sequence | None:
    """Return the sequence to preempt when blocks run out: the lowest priority, and of those the latest."""
    return max(running, key=lambda sequence: rank_of(sequence, limits.ageing_s), default=None)
