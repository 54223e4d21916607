"""What goes into an engine step and what comes out: plain values, so that tests and the echo engine need no torch.

A step is a list of rows. A row is one sequence's share of the step: some consecutive tokens at known positions, the
blocks that hold its keys and values, and, if its last token's successor is wanted, how to sample it.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Penalties:
    """What makes tokens that have occurred less likely (or, with opposite signs, more).

    `presence` and `frequency` (0: off) count the `generated` tokens, `repetition` (1: off) both.
    """

    presence: float
    frequency: float
    repetition: float
    prompt: tuple[int, ...]
    generated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose one token. Randomness depends on `seed` and `position` alone (invariant 3).

    temperature 0 is greedy; top_k 0, top_p 1.0 and min_p 0.0 are off. `position` is the position that the sampled token
    will have in the sequence. `num_logprobs`: None for no logprobs, k for the sampled token's and the k likeliest.
    `banned` tokens cannot be sampled (end tokens before min_tokens). `allowed`, if not None, is a bitmask of the tokens
    that can: bit t % 8 of byte t // 8; tokens beyond its end cannot. `bias` holds (token, what is added to its logit).
    Logprobs are of the raw distribution.
    """

    position: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int | None = None
    banned: tuple[int, ...] = ()
    allowed: bytes | None = None
    bias: tuple[tuple[int, float], ...] = ()
    penalties: Penalties | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether an option other than temperature and the filters acts on the logits."""
        return bool(self.banned or self.bias) or self.allowed is not None or self.penalties is not None

    @property
    def only_allows(self) -> bool:
        """Whether nothing acts on the logits but that some tokens are not allowed, or banned."""
        return self.allowed is not None and not self.bias and self.penalties is None

    @property
    def is_plain(self) -> bool:
        """Whether only the token is asked for, by the logits as they are: then a greedy choice needs nothing else."""
        return self.num_logprobs is None and not self.changes_logits


@dataclass(frozen=True, slots=True)
class Scoring:
    """Asks for the logprobs of known tokens: `targets[i]` follows the row's token i; of each also the k likeliest.

    There is one target less than tokens in a row whose last token's successor is not known.
    """

    targets: tuple[int, ...]
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    `tokens` (≥ 1) stand at positions start, start+1, …; `blocks[i]` holds positions [i*block_size, (i+1)*block_size)
    and the table covers at least start+len(tokens) positions. `prompt_len` is where generated tokens begin. `sampling`
    is None for a prefill chunk that is not the last. A row with `scoring` goes through `Engine.score`, alone; rows with
    `hidden`, which names the tokens whose final hidden states are wanted, through `Engine.hidden_states`.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    prompt_len: int
    sampling: Sampling | None = None
    scoring: Scoring | None = None
    hidden: Literal["all", "last"] | None = None


NO_TOKEN = -1
"""`Sampled.token` of a row that has no answer: a logit was NaN or +inf, or all were -inf.

The caller fails that request and no other.
"""

NOTHING_ALLOWED = -2
"""`Sampled.token` of a row whose own options exclude every token: nothing can follow."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token, or NO_TOKEN or NOTHING_ALLOWED.

    `logprob` and `top` (token, logprob; likeliest first) only when asked for.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """The targets' logprobs as tokens that were not sampled, and the row's own sampled token if it asks for one."""

    targets: tuple[Sampled, ...]
    sampled: Sampled | None
