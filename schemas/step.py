"""One step of continuous batching: the plan that a scheduler sends to an executor, and the result that comes back.

A sequence's data is sent once, when it is new to the executor; afterwards the plan names it by number and the executor
feeds its own last token. So a plan can be sent before the result of the step before it is known.
"""

from typing import ClassVar, Literal

from schemas.cache import BlockCopy
from schemas.codec import Message, Part
from schemas.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]
MAX_PLANS_AHEAD = 8
"""Steps that may be sent to an executor before their results are back."""


class NewSequence(Part):
    """Everything about a sequence that is new to the executor.

    `sequence` is a number unique within the epoch. `token_ids` are the prompt and whatever was generated before (after
    a takeover or a preemption); generated tokens begin at `prompt_len`. `num_computed` tokens are in `blocks` already.
    The executor ends the sequence at `max_len` tokens in all, or at a token of `stop_token_ids`.
    """

    sequence: int
    request_id: str
    index: int = 0
    token_ids: tuple[int, ...]
    prompt_len: int
    max_len: int
    num_computed: int = 0
    blocks: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    traceparent: str | None = None


class Run(Part):
    """`num_tokens` of a known sequence to run in this step, after adding `blocks` to its table.

    Forced tokens that follow the last one are run along with it and not counted.
    """

    sequence: int
    num_tokens: int = 1
    blocks: tuple[int, ...] = ()


class StepPlan(Message):
    """One step's work. Steps of an epoch are numbered from 1; a higher epoch forgets every sequence of a lower one.

    Applied in the order `drop`, `copies`, `new`, `run`. A `run` of a sequence that the executor has finished by itself
    is skipped.
    """

    SCHEMA: ClassVar[str] = "step_plan"

    scheduler: str
    epoch: int
    step: int
    drop: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    new: tuple[NewSequence, ...] = ()
    run: tuple[Run, ...] = ()


class TokenLogprob(Part):
    """Raw log-probabilities at one position: of the sampled token, and of the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(Part):
    """One token that a step produced, and whether it ended its sequence; a negative one is none: only the end.

    `prompt_logprobs` come with the first generated token when they are asked for: of the prompt's tokens from the
    second on. `embedding` comes instead of a token: little-endian float32 values in base64. `forced` tokens follow
    `token`: those that alone may, by the sequence's grammar; they need no step, and `finish_reason` is the last one's.
    """

    sequence: int
    position: int
    token: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop_token: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: str | None = None
    forced: tuple[int, ...] = ()


class StepResult(Message):
    """What a step produced; `fault` instead when the plan could not be run (a gap in the numbers, a stale epoch).

    `duration_s` is the engine's time; `idle_s` the time that it waited for this plan. `num_wasted` counts runs of
    sequences that had already ended.
    """

    SCHEMA: ClassVar[str] = "step_result"

    executor: str
    epoch: int
    step: int
    sampled: tuple[SampledToken, ...] = ()
    num_wasted: int = 0
    duration_s: float = 0.0
    idle_s: float = 0.0
    fault: str | None = None
