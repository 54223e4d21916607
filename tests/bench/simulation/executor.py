"""A simulated executor: ends its sequences as a real one does, and takes as long as it is told.

Its answers depend on the order of its plans alone, so a step can be worked out when its plan is sent, and only be heard
later.
"""

from dataclasses import dataclass, field

from schemas.step import SampledToken, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Timing:
    """The echo engine's: every step takes `step_s`. Beyond that, a prompt takes `prompt_token_s` for each token."""

    step_s: float = 0.015
    prompt_token_s: float = 1e-4
    hop_s: float = 0.0005
    """From one process to another."""


@dataclass(slots=True)
class _Sequence:
    num_tokens: int
    num_computed: int
    max_len: int


@dataclass(slots=True)
class SimulatedExecutor:
    """One engine; `busy_s` is the time that it has computed, `free_s` when it will have run its last plan."""

    name: str
    timing: Timing
    free_s: float = 0.0
    busy_s: float = 0.0
    num_sampled: int = 0
    num_prompt_tokens: int = 0
    is_alive: bool = True
    _running: dict[int, _Sequence] = field(default_factory=dict)

    def run(self, plan: StepPlan, sent_s: float) -> tuple[float, StepResult]:
        """Return (when the result is heard, the result) of a plan that leaves the scheduler now."""
        for number in plan.drop:
            self._running.pop(number, None)
        for new in plan.new:
            self._running[new.sequence] = _Sequence(len(new.token_ids), new.num_computed, new.max_len)
        sampled: list[SampledToken] = []
        num_prompt_tokens = num_wasted = 0
        for run in plan.run:
            sequence = self._running.get(run.sequence)
            if sequence is None:
                num_wasted += 1
                continue
            sequence.num_computed += run.num_tokens
            if run.num_tokens > 1:
                num_prompt_tokens += run.num_tokens
            if sequence.num_computed == sequence.num_tokens:
                sampled.append(self._sample(run.sequence, sequence))
        duration_s = self.timing.step_s + num_prompt_tokens * self.timing.prompt_token_s
        self.free_s = max(sent_s + self.timing.hop_s, self.free_s) + duration_s
        self.busy_s += duration_s
        self.num_sampled += len(sampled)
        self.num_prompt_tokens += num_prompt_tokens
        result = StepResult(
            executor=self.name,
            epoch=plan.epoch,
            step=plan.step,
            sampled=tuple(sampled),
            num_wasted=num_wasted,
            duration_s=duration_s,
        )
        return self.free_s + self.timing.hop_s, result

    def _sample(self, number: int, sequence: _Sequence) -> SampledToken:
        """Say something that follows from the position, as a model that is asked the same again would."""
        position = sequence.num_tokens
        sequence.num_tokens += 1
        is_last = sequence.num_tokens >= sequence.max_len
        if is_last:
            del self._running[number]
        return SampledToken(
            sequence=number, position=position, token=position % 997, finish_reason="length" if is_last else None
        )
