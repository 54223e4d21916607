"""Choosing tokens from logits: greedy or random, with logprobs. Owns no state; knows nothing of models.

Order (that of vLLM's sampler, https://docs.vllm.ai/en/v0.20.0/api/vllm/v1/sample/sampler/):

    raw logprobs → the options of logit_rules.py → greedy if temperature < 1e-5,
                                                   else temperature → min_p → top_k → top_p → draw

min_p keeps tokens at least min_p times as likely as the likeliest; top_p keeps the fewest likeliest tokens
whose share of what min_p and top_k left reaches top_p, at least one. With all tokens ranked by falling logit,
ties by rising id, each of the three keeps a prefix of the ranking, so the filters reduce to one length. (At a
tie on the last place of top_k exactly k tokens stay, where vLLM keeps all that tie.)

Randomness: one uniform number per token, a function of (seed, position) alone, by which the inverse of the
cumulative distribution over the ranking is read. A row's result depends on its own logits and `Sampling`
only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.batch import NO_TOKEN, NOTHING_ALLOWED, Row, Sampled, Sampling, Scored
from engine_core.logit_rules import candidates, is_candidate, ruled

Int64s = NDArray[np.int64]

GREEDY_BELOW_TEMPERATURE = 1e-5
SMALLEST_WEIGHT = 2.0**-1022
RANKED_ABOVE = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Weights, relative to the likeliest token's, above which tokens are ranked: the first that is enough."""

PIECE_TOKENS = 64
"""So many tokens of a scored row are run at a time."""

WORD_MASK = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


def sample(logits: Tensor, specs: Sequence[Sampling]) -> list[Sampled]:
    """Choose one token per row of logits [rows, vocab] float32, each by the spec of the same index.

    A logit of -inf is a token that cannot be chosen. A row without an answer gets the token NO_TOKEN.
    """
    if not specs:
        return []
    # One pass over the batch settles what most rows need. torch.argmax returns the first of equal maxima.
    peaks = logits.amax(dim=1).tolist()
    likeliest = logits.argmax(dim=1).tolist()
    return [
        sample_row(row, spec, token) if abs(peak) < float("inf") else Sampled(NO_TOKEN)
        for row, spec, token, peak in zip(logits, specs, likeliest, peaks, strict=True)
    ]


def sample_one(logits: Tensor, spec: Sampling, likeliest: int) -> Sampled:
    """As `sample`, of logits [vocab] on the CPU whose greedy token is known."""
    return sample_row(logits, spec, likeliest) if abs(float(logits.numpy().max())) < float("inf") else Sampled(NO_TOKEN)


def sample_row(logits: Tensor, spec: Sampling, likeliest: int) -> Sampled:
    """One row: logits [vocab], not NaN or +inf, on any device; `likeliest` its greedy token.

    A greedy choice that asks for nothing else leaves the logits where they are.
    """
    if spec.is_plain and (spec.temperature < GREEDY_BELOW_TEMPERATURE or spec.top_k == 1):
        return Sampled(likeliest)
    greedy = spec.temperature < GREEDY_BELOW_TEMPERATURE or spec.top_k == 1
    if is_settled(spec, likeliest):
        return Sampled(likeliest)
    allowed = logits = logits.float().cpu()
    if spec.only_allows and spec.num_logprobs is None:
        return sample_among(candidates(spec, len(logits)), logits, spec)
    if spec.changes_logits:
        allowed = ruled(logits, spec)
        likeliest = int(allowed.argmax())
        if allowed[likeliest] == -torch.inf:
            return Sampled(NOTHING_ALLOWED)
    token = likeliest if greedy else draw(allowed, spec)
    if spec.num_logprobs is None:
        return Sampled(token)
    return with_logprobs(logits, token, spec.num_logprobs)


def is_settled(spec: Sampling, likeliest: int) -> bool:
    """Whether the likeliest token of all is the answer: it is the likeliest of those that are allowed, being one."""
    greedy = spec.temperature < GREEDY_BELOW_TEMPERATURE or spec.top_k == 1
    if not greedy or spec.num_logprobs is not None or likeliest < 0:
        return False
    return spec.is_plain or (spec.only_allows and is_candidate(likeliest, spec))


def sample_among(tokens: Int64s, logits: Tensor, spec: Sampling) -> Sampled:
    """Choose one of `tokens` [few], in rising order, by logits [vocab]: the others are not even looked at."""
    among = torch.from_numpy(logits.numpy()[tokens])
    if not len(tokens) or among.max() == -torch.inf:
        return Sampled(NOTHING_ALLOWED)
    greedy = spec.temperature < GREEDY_BELOW_TEMPERATURE or spec.top_k == 1
    return Sampled(int(tokens[int(among.argmax()) if greedy else draw(among, spec)]))


def score(pieces: Iterable[tuple[Row, Tensor]], row: Row) -> Scored:
    """Score a row from the logits after each token, which come piece by piece: (piece, [its tokens, vocab])."""
    scoring, targets, last = row.scoring, [], None
    if scoring is None:
        raise ValueError("the row asks for no scores")
    for piece, logits in pieces:
        begin = piece.start - row.start
        for target, after in zip(scoring.targets[begin : begin + len(logits)], logits, strict=False):
            targets.append(with_logprobs(after, target, scoring.num_logprobs))
        last = logits[-1:]
    sampled = None if row.sampling is None or last is None else sample(last, [row.sampling])[0]
    return Scored(tuple(targets), sampled)


def pieces_of(row: Row) -> Iterator[Row]:
    """Cut a row, so that the logits after all its tokens never fill the memory."""
    for begin in range(0, len(row.tokens), PIECE_TOKENS):
        yield replace(row, tokens=row.tokens[begin : begin + PIECE_TOKENS], start=row.start + begin)


def with_logprobs(logits: Tensor, token: int, num_logprobs: int) -> Sampled:
    """Attach the natural logarithms of the raw distribution's probabilities, before options and temperature."""
    logprobs = torch.log_softmax(logits.double(), dim=0)
    top = likeliest_tokens(logits, min(num_logprobs, len(logits)))
    return Sampled(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def draw(logits: Tensor, spec: Sampling) -> int:
    """Draw from logits [vocab], at least one finite, by the spec's filters and its uniform number."""
    # Relative to the likeliest, whose weight is then exactly 1: a tiny temperature cannot overflow.
    weights = (logits.double() - logits.max()).div_(spec.temperature).exp_()
    values = weights.numpy()
    # Tokens of weight 0 (banned, or infinitely unlikely) are never drawn.
    least = max(spec.min_p, SMALLEST_WEIGHT)
    values[values < least] = 0.0
    total = float(weights.sum())
    share = uniform(spec.seed, spec.position)
    needed = total * (share if spec.top_p >= 1.0 else spec.top_p)
    ranked = by_falling_logit(tokens_to_rank(values, least, needed, spec.top_k), logits)[: spec.top_k or None]
    cumulative = torch.from_numpy(values[ranked]).cumsum(0)
    last = len(ranked) - 1
    if spec.top_k:
        total = float(cumulative[-1])
    if spec.top_p < 1.0:
        last = min(int(torch.searchsorted(cumulative, spec.top_p * total)), last)
        total = float(cumulative[last])
    return int(ranked[min(int(torch.searchsorted(cumulative, share * total, right=True)), last)])


def tokens_to_rank(weights: NDArray[np.float64], least: float, needed: float, top_k: int) -> Int64s:
    """Likeliest tokens of weight ≥ `least`, as few as is quickly found: sorting a vocabulary is slow.

    At least `top_k` of them, or if that is off so many that their weights reach `needed`, or else all.
    """
    tokens = np.flatnonzero(weights >= max(least, RANKED_ABOVE[-1]))
    likely = weights[tokens]
    for threshold in RANKED_ABOVE:
        if threshold <= least:
            break
        chosen = likely >= threshold
        # The margin is for sums in another order than the cumulative one.
        if np.count_nonzero(chosen) >= top_k if top_k else likely[chosen].sum() > needed * (1 + 1e-9):
            return tokens[chosen]
    return tokens if least >= RANKED_ABOVE[-1] else np.flatnonzero(weights >= least)


def by_falling_logit(tokens: Int64s, logits: Tensor) -> Int64s:
    """Rank tokens < 2³² by falling logit of [vocab] float32, ties by rising id.

    Each becomes one integer that sorts so: a float's bits, turned to fall as it rises, before the token's id.
    """
    bits = (logits.numpy()[tokens] + np.float32(0.0)).view(np.uint32)  # -0.0 + 0.0 is 0.0, with which it ties
    falling = np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF).astype(np.uint64)
    return (np.sort(falling << np.uint64(32) | tokens.astype(np.uint64)) & np.uint64(WORD_MASK)).astype(np.int64)


def likeliest_tokens(logits: Tensor, size: int) -> Int64s:
    """The `size` likeliest tokens by falling logit, ties by rising id."""
    if size == 0:
        return np.empty(0, dtype=np.int64)
    # torch.topk does not say which of equal logits it takes: it serves only to find the threshold.
    threshold = float(torch.topk(logits, size).values[-1])
    return by_falling_logit(np.flatnonzero(logits.numpy() >= threshold), logits)[:size]


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits: Philox4x32-10 with the seed as key and the position as
    counter.
    """
    seed_words = (seed & WORD_MASK, seed >> 32 & WORD_MASK)
    first, second, _, _ = philox((position & WORD_MASK, position >> 32 & WORD_MASK, 0, 0), seed_words)
    return ((first << 32 | second) >> 11) / 2**53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words from a counter and a key.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            product1 >> 32 ^ c1 ^ k0,
            product1 & WORD_MASK,
            product0 >> 32 ^ c3 ^ k1,
            product0 & WORD_MASK,
        )
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & WORD_MASK, (k1 + PHILOX_KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3
