"""A request while the scheduler holds it, and its sequences, one per choice: the only mutable request objects.

A sequence counts what has been planned apart from what is known: a plan is sent before the result of the plan before it
is back, so `num_pending` sampled tokens may be on their way.
"""

from dataclasses import dataclass, field
from typing import Literal

from schemas.codec import Part
from schemas.errors import NatterjackError
from schemas.generation import WorkItem
from schemas.sampling import SamplingParams
from schemas.step import FinishReason, NewSequence, TokenLogprob
from services.scheduler.block_keys import Naming, extend_keys

Status = Literal["waiting", "acquiring", "running", "finished"]
SetbackKind = Literal["preempted", "executor_lost"]
SEED_RANGE = 2**64


class DurableChoice(Part):
    """What the output log already holds of one choice."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Setback:
    """What made a running sequence wait again: where, at what Unix time, and how many generated tokens were known."""

    kind: SetbackKind
    executor: str
    at_s: float
    num_generated: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request on its way through an executor.

    `tokens` are the prompt and the known generated tokens, of which the output log held `num_durable` when the request
    came. `num_planned` of them (pending ones included) were computed or are in a plan that was sent; the results
    of `num_computed` are back. `blocks` are leased; the executor knows the first `num_sent_blocks`, and the cache
    manager the content of the first `num_registered`. `keys` name the content of the blocks that the tokens fill.
    """

    request: "Request"
    index: int
    tokens: list[int]
    max_len: int
    num_durable: int = 0
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    number: int = 0
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_planned: int = 0
    num_pending: int = 0
    num_computed: int = 0
    num_registered: int = 0
    keys: list[str] = field(default_factory=list)
    naming: Naming | None = None
    num_cached: int = 0
    is_known: bool = False
    is_admitted: bool = False
    setback: Setback | None = None
    first_admitted_s: float = 0.0
    first_token_s: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_len: int = field(init=False)
    embedding: str | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.work.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Known generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_to_run(self) -> int:
        """Tokens that could be computed now; the last token of a full sequence never needs to be."""
        return min(len(self.tokens) + self.num_pending, self.max_len - 1) - self.num_planned

    @property
    def is_decoding(self) -> bool:
        """Tell whether one token a step is all that there is to run."""
        return self.num_to_run <= 1

    def num_to_cover(self, lookahead: int) -> int:
        """Tokens that a lease should cover now."""
        return min(self.max_len, self.num_planned + max(self.num_to_run, 0) + lookahead)

    def name_blocks(self, naming: Naming) -> list[str]:
        """Return the keys of all blocks that the known tokens fill."""
        if self.naming != naming:
            self.keys, self.naming = [], naming
        extend_keys(self.keys, self.tokens, naming, self.request.work.cache_salt)
        return self.keys

    def prefix_keys(self, naming: Naming) -> tuple[str, ...]:
        """Return the keys of the blocks that may be shared: the last known token is always computed.

        A prompt whose own logprobs are asked for is computed as a whole, as is every one that wants to be.
        """
        work = self.request.work
        if work.skip_reading_prefix_cache or (work.sampling.num_prompt_logprobs is not None and not self.num_generated):
            return ()
        return tuple(self.name_blocks(naming)[: (len(self.tokens) - 1) // naming.block_size])

    def plan(self, num_tokens: int) -> None:
        """Note that a plan runs the next `num_tokens`; the last one of the known tokens samples one more."""
        self.num_planned += num_tokens
        if self.num_planned == len(self.tokens) + self.num_pending:
            self.num_pending += 1

    def reset(self) -> None:
        """Forget everything that an executor held; the known tokens become the prefix to compute again."""
        self.status = "waiting"
        self.blocks.clear()
        self.number = self.num_sent_blocks = self.num_planned = self.num_pending = 0
        self.num_computed = self.num_registered = 0
        self.is_known = False

    def to_new_sequence(self) -> NewSequence:
        """Return what an executor needs to know of this sequence."""
        work = self.request.work
        return NewSequence(
            sequence=self.number,
            request_id=work.request_id,
            index=self.index,
            token_ids=tuple(self.tokens),
            prompt_len=self.prompt_len,
            max_len=self.max_len,
            num_computed=self.num_cached,
            blocks=tuple(self.blocks),
            sampling=choice_sampling(work.sampling, self.index),
            stop_token_ids=work.stop_token_ids,
            end_token_ids=work.end_token_ids,
            traceparent=self.request.traceparent,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request: its work item, its choices, and the state of its output.

    `epoch` fences the writers of its output log. `is_open`: the tokenizer was told to write. `error`: the request as a
    whole has failed, which its final chunk will say. `handle` is the queue's delivery, opaque here.
    """

    work: WorkItem
    handle: object
    epoch: int
    received_s: float
    traceparent: str | None = None
    is_resumed: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    tokenizer: str = ""
    is_open: bool = False
    error: NatterjackError | None = None
    num_restarts: int = 0
    quiet_since_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Tell whether anything of it has ever run, here or before."""
        return any(s.first_admitted_s > 0 or s.num_generated > 0 for s in self.sequences)

    @property
    def is_finished(self) -> bool:
        """Tell whether nothing is left to generate."""
        return self.error is not None or all(s.status == "finished" for s in self.sequences)


def new_request(
    work: WorkItem,
    handle: object,
    *,
    now_s: float,
    epoch: int = 1,
    traceparent: str | None = None,
    durable: tuple[DurableChoice, ...] = (),
) -> Request:
    """Return a request with one sequence per choice; choices go on behind the tokens in `durable`."""
    request = Request(work, handle, epoch, now_s, traceparent, is_resumed=epoch > 1, quiet_since_s=now_s)
    request.tokenizer = work.tokenizer
    for index in range(work.n):
        known = durable[index] if index < len(durable) else DurableChoice()
        sequence = Sequence(
            request=request,
            index=index,
            tokens=[*work.prompt_token_ids, *known.token_ids],
            max_len=len(work.prompt_token_ids) + work.max_tokens,
            num_durable=len(known.token_ids),
        )
        if known.is_finished or sequence.num_generated >= work.max_tokens:
            sequence.status = "finished"
            sequence.finish_reason = None if known.is_finished else "length"
        request.sequences.append(sequence)
    return request


def choice_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one choice: the seed counts up, so that choices differ and each is reproducible."""
    return sampling.model_copy(update={"seed": (sampling.seed + index) % SEED_RANGE})
