"""The executor's sequences: turns step plans into rows for the engine, and sampled tokens into step results. Pure.

Owns each sequence's tokens, block table and progress. Sequences feed their own last token, end by themselves at a stop
token or at their length limit, and are forgotten when a plan drops them or a higher epoch begins.
"""

import base64
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine_core.batch import NO_TOKEN, NOTHING_ALLOWED, Row, Sampled, Scored, Scoring
from engine_core.grammar import Grammar, Grammars
from engine_core.pooling import HiddenPool
from schemas.step import (
    MAX_PLANS_AHEAD,
    FinishReason,
    NewSequence,
    Run,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from services.executor.choosing import Choosing

Hidden = NDArray[np.float32]
Answer = Sampled | Scored | Hidden | None
"""What the engine says to a row: hidden states for one that is to be embedded."""


@dataclass(slots=True)
class Sequence:
    """One sequence on this executor; `pool` gathers the hidden states of one whose embedding is wanted.

    `num_forced` tokens at the end of `tokens` follow from the one before them; the next run computes them with it.
    """

    data: NewSequence
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    stop_tokens: frozenset[int]
    choosing: Choosing
    started_s: float
    first_token_s: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pool: HiddenPool | None = None
    num_forced: int = 0

    @property
    def num_generated(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.tokens) - self.data.prompt_len

    def row(self, num_tokens: int) -> Row:
        """Return the next `num_tokens` as a row; the last one samples when nothing known is left to compute."""
        start = self.num_computed
        tokens = tuple(self.tokens[start : start + num_tokens])
        is_last = start + len(tokens) == len(self.tokens)
        prompt_len = self.data.prompt_len
        if self.pool is not None:
            wanted: Literal["all", "last"] | None = "all" if self.pool.kind == "mean" else "last" if is_last else None
            return Row(tokens, start, tuple(self.blocks), prompt_len, hidden=wanted)
        sampling = self.choosing.next_token(self.tokens, prompt_len) if is_last else None
        return Row(tokens, start, tuple(self.blocks), prompt_len, sampling, self._scoring(start, len(tokens)))

    def _scoring(self, start: int, num_tokens: int) -> Scoring | None:
        """Ask for the logprobs of the prompt's tokens, unless its generated tokens have brought them already."""
        num_logprobs = self.data.sampling.num_prompt_logprobs
        if num_logprobs is None or len(self.tokens) > self.data.prompt_len:
            return None
        return Scoring(tuple(self.tokens[start + 1 : start + num_tokens + 1]), num_logprobs)

    def embedding(self) -> str | None:
        """Return the vector as little-endian float32 in base64; None when states are missing or not finite."""
        pooling, pool = self.data.sampling.pooling, self.pool
        if pooling is None or pool is None or (pool.kind == "mean" and pool.num_added != len(self.tokens)):
            return None
        vector = pool.vector(pooling.dimensions)
        return None if vector is None else base64.b64encode(vector.astype("<f4").tobytes()).decode()

    def append_forced(self, max_len: int) -> FinishReason | None:
        """Append the tokens that alone can follow, up to `max_len` in all; tell whether the last one ends the sequence.

        They are what sampling would give, because nothing else is allowed; so no step is needed to choose them.
        """
        reason: FinishReason | None = None
        while reason is None and len(self.tokens) < max_len:
            token = self.choosing.forced_token(self.tokens, self.data.prompt_len)
            if token is None:
                break
            self.tokens.append(token)
            self.num_forced += 1
            reason = self.finish_reason()
        return reason

    def finish_reason(self) -> FinishReason | None:
        """Tell whether the newest token ends the sequence."""
        if self.tokens[-1] in self.stop_tokens or self.choosing.is_complete(self.tokens, self.data.prompt_len):
            return "stop"
        return "length" if len(self.tokens) >= self.data.max_len else None


@dataclass(frozen=True, slots=True)
class Ended:
    """What a trace tells of a sequence that has left the executor; times are Unix seconds."""

    data: NewSequence
    started_s: float
    first_token_s: float | None
    num_generated: int


class PlanRefused(Exception):
    """The plan cannot be run: a step is missing before it."""


@dataclass(slots=True)
class Sequences:
    """All sequences of the current epoch, and the step that it expects next.

    `block_size` 0: tokens that a grammar forces are sampled like all others.
    """

    epoch: int = 0
    next_step: int = 1
    running: dict[int, Sequence] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    grammars: Grammars | None = None
    block_size: int = 0
    _rows: list[Sequence] = field(default_factory=list)
    _num_wasted: int = 0

    def begin(self, plan: StepPlan, now_s: float) -> list[Row] | None:
        """Apply a plan and return the rows to run, None for one that is stale or already done.

        Raises PlanRefused when a plan before it was lost.
        """
        if plan.epoch < self.epoch or (plan.epoch == self.epoch and plan.step < self.next_step):
            return None
        if plan.epoch > self.epoch:
            self._forget_all()
            self.epoch, self.next_step = plan.epoch, 1
        if plan.step != self.next_step:
            raise PlanRefused(f"expected step {self.next_step} of epoch {self.epoch}, got {plan.step}")
        self.next_step += 1
        for number in plan.drop:
            self._end(number)
        for data in plan.new:
            self._add(data, now_s)
        return self._select(plan.run)

    def _forget_all(self) -> None:
        for number in list(self.running):
            self._end(number)

    def _end(self, number: int) -> None:
        sequence = self.running.pop(number, None)
        if sequence is not None:
            times = (sequence.started_s, sequence.first_token_s)
            self.ended.append(Ended(sequence.data, *times, sequence.num_generated))

    def _add(self, data: NewSequence, now_s: float) -> None:
        pooling = data.sampling.pooling
        self.running[data.sequence] = Sequence(
            data=data,
            tokens=list(data.token_ids),
            blocks=list(data.blocks),
            num_computed=data.num_computed,
            stop_tokens=frozenset(data.stop_token_ids),
            choosing=Choosing(data.sampling, data.stop_token_ids + data.end_token_ids, self._grammar(data)),
            started_s=now_s,
            pool=None if pooling is None else HiddenPool(pooling.kind),
        )

    def _grammar(self, data: NewSequence) -> Grammar | None:
        if not data.sampling.grammar:
            return None
        return Grammar(None) if self.grammars is None else self.grammars.begin(data.sampling.grammar)

    def _select(self, runs: tuple[Run, ...]) -> list[Row]:
        rows: list[Row] = []
        self._rows, self._num_wasted = [], 0
        for run in runs:
            sequence = self.running.get(run.sequence)
            if sequence is None:
                self._num_wasted += 1
                continue
            sequence.blocks.extend(run.blocks)
            row = sequence.row(run.num_tokens + sequence.num_forced)
            sequence.num_computed, sequence.num_forced = sequence.num_computed + len(row.tokens), 0
            rows.append(row)
            self._rows.append(sequence)
        return rows

    def finish(self, plan: StepPlan, answers: list[Answer], now_s: float) -> StepResult:
        """Take the engine's answers for the rows of `begin` and return the step's result."""
        tokens: list[SampledToken] = []
        for sequence, answer in zip(self._rows, answers, strict=True):
            if isinstance(answer, np.ndarray):
                tokens += self._pool(sequence, answer, now_s)
                continue
            if isinstance(answer, Scored):
                sequence.prompt_logprobs += [lp for one in answer.targets if (lp := _logprob(one)) is not None]
                answer = answer.sampled
            if answer is not None:
                tokens.append(self._accept(sequence, answer, now_s))
        return StepResult(
            executor="", epoch=plan.epoch, step=plan.step, sampled=tuple(tokens), num_wasted=self._num_wasted
        )

    def _accept(self, sequence: Sequence, sampled: Sampled, now_s: float) -> SampledToken:
        position = len(sequence.tokens)
        prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        has_ended = sampled.token == NOTHING_ALLOWED and not sequence.choosing.is_broken
        reason: FinishReason | None = "stop" if has_ended else "error"
        if sampled.token >= 0:
            sequence.tokens.append(sampled.token)
            reason = sequence.finish_reason() or sequence.append_forced(self._max_forced_len(sequence))
        if reason is not None:
            self._end(sequence.data.sequence)
        return SampledToken(
            sequence=sequence.data.sequence,
            position=position,
            token=sampled.token,
            logprob=_logprob(sampled),
            finish_reason=reason,
            stop_token=reason == "stop" and sampled.token >= 0 and sequence.tokens[-1] in sequence.stop_tokens,
            prompt_logprobs=prompt_logprobs,
            forced=tuple(sequence.tokens[position + 1 :]),
        )

    def _max_forced_len(self, sequence: Sequence) -> int:
        """Forced tokens must leave the lease's room that plans on their way have counted on: a token each.

        The very next one runs the forced tokens along, and the one after it is made with its token already counted.
        """
        return len(sequence.blocks) * self.block_size - (MAX_PLANS_AHEAD - 2)

    def _pool(self, sequence: Sequence, hidden: Hidden, now_s: float) -> list[SampledToken]:
        """Take hidden states; those of the last token end the sequence, with its embedding and without a token."""
        if sequence.pool is not None:
            sequence.pool.add(hidden)
        if sequence.num_computed < len(sequence.tokens):
            return []
        embedding = sequence.embedding()
        sequence.first_token_s = now_s
        self._end(sequence.data.sequence)
        return [
            SampledToken(
                sequence=sequence.data.sequence,
                position=len(sequence.tokens),
                token=NO_TOKEN,
                finish_reason="error" if embedding is None else "stop",
                embedding=embedding,
            )
        ]

    def take_ended(self) -> list[Ended]:
        """Return, once, the sequences that have left since the last call."""
        ended, self.ended = self.ended, []
        return ended


def _logprob(sampled: Sampled) -> TokenLogprob | None:
    return None if sampled.logprob is None else TokenLogprob(logprob=sampled.logprob, top=sampled.top)


def without_embeddings(result: StepResult) -> StepResult:
    """Return the result in which every sequence that had an embedding has failed instead."""
    failed = {"embedding": None, "finish_reason": "error"}
    sampled = tuple(s if s.embedding is None else s.model_copy(update=failed) for s in result.sampled)
    return result.model_copy(update={"sampled": sampled})
