"""How tokens are chosen: the resolved parameters that travel from the tokenizer to the executor."""

from typing import Literal

from schemas.codec import Part

PoolingKind = Literal["mean", "last"]


class Pooling(Part):
    """How a prompt's final normed hidden states become one vector of L2 norm 1.

    `mean` of all positions, or the `last` one. Of the pooled vector the first `dimensions` values are kept, if that is
    set, before it is normalised.
    """

    kind: PoolingKind = "mean"
    dimensions: int | None = None


class SamplingParams(Part):
    """Resolved sampling parameters: nothing is left to defaults further down the path.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. `seed` is always set: randomness is a function of
    (seed, position) alone, so a request continued elsewhere draws the same numbers. `num_logprobs`: None for none, k
    for the sampled token's logprob and the k likeliest. Presence and frequency penalty (0: off) count generated tokens,
    the repetition penalty (1: off) prompt and generated ones. `logit_bias` holds (token, what is added to its logit).
    `allowed_token_ids`: only these, unless it is empty. `bad_words` are sequences of tokens that must not be completed.
    `num_prompt_logprobs` asks the same as `num_logprobs` of the prompt's tokens.
    `grammar`, in llguidance's form, is what the generated text must follow; the empty one is none.
    With `pooling` no token is chosen: the prompt's embedding is wanted instead.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    pooling: Pooling | None = None
