"""Sampling: exact against a slow version in plain Python, right in distribution, a function of seed and position."""

import math
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine_core.batch import NO_TOKEN, NOTHING_ALLOWED, Sampled, Sampling
from engine_core.sampling import philox, sample, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.5])


def sample_one(logits: torch.Tensor, **spec: object) -> Sampled:
    return sample(logits[None], [Sampling(**{"position": 7, "seed": 1} | spec)])[0]


def tokens_drawn(logits: torch.Tensor, count: int, **spec: object) -> Counter[int]:
    specs = [Sampling(**{"position": position, "seed": 5} | spec) for position in range(count)]
    return Counter(sampled.token for sampled in sample(logits.expand(count, -1), specs))


def plain_distribution(logits: list[float], spec: Sampling) -> list[tuple[int, float]]:
    """What may be drawn and with which probability, likeliest first: the definition, step by step."""
    allowed = [(token, logit) for token, logit in enumerate(logits) if token not in spec.banned]
    ranked = sorted(allowed, key=lambda pair: (-pair[1], pair[0]))
    peak = ranked[0][1]
    left = [(token, math.exp((logit - peak) / spec.temperature)) for token, logit in ranked]
    total = math.fsum(weight for _, weight in left)
    probabilities = [(token, weight / total) for token, weight in left]
    at_least = spec.min_p * probabilities[0][1]
    probabilities = [(token, p) for token, p in probabilities if p > 0 and p >= at_least * (1 - 1e-15)]
    if spec.top_k:
        probabilities = probabilities[: spec.top_k]
    total = math.fsum(p for _, p in probabilities)
    nucleus: list[tuple[int, float]] = []
    for token, p in probabilities:
        if nucleus and spec.top_p < 1 and math.fsum(q for _, q in nucleus) >= spec.top_p * total:
            break
        nucleus.append((token, p))
    total = math.fsum(p for _, p in nucleus)
    return [(token, p / total) for token, p in nucleus]


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id():
    assert sample_one(LOGITS, temperature=0.0).token == 1
    assert sample_one(LOGITS, temperature=1e-6).token == 1


def test_top_k_1_is_greedy():
    assert tokens_drawn(LOGITS, 200, top_k=1, temperature=5.0) == {1: 200}


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids():
    assert set(tokens_drawn(LOGITS, 500, top_k=3, temperature=5.0)) == {1, 2, 3}
    assert set(tokens_drawn(torch.zeros(50), 500, top_k=4)) == {0, 1, 2, 3}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert set(tokens_drawn(logits, 500, top_p=0.49)) == {1}
    assert set(tokens_drawn(logits, 500, top_p=0.74)) == {1, 3}
    assert set(tokens_drawn(logits, 500, top_p=0.76)) == {1, 2, 3}
    assert set(tokens_drawn(logits, 500, top_p=0.0)) == {1}


def test_top_p_is_a_share_of_what_top_k_left():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert set(tokens_drawn(logits, 500, top_k=2, top_p=0.66)) == {1}
    assert set(tokens_drawn(logits, 500, top_k=2, top_p=0.67)) == {1, 3}


def test_min_p_is_relative_to_the_likeliest_and_applied_after_temperature():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert set(tokens_drawn(logits, 500, min_p=0.49)) == {1, 3}
    assert set(tokens_drawn(logits, 500, min_p=1.0)) == {1}
    assert set(tokens_drawn(logits, 800, min_p=0.49, temperature=3.0)) == {0, 1, 2, 3}


def test_banned_tokens_are_never_sampled():
    assert sample_one(LOGITS, temperature=0.0, banned=(1,)).token == 3
    assert set(tokens_drawn(LOGITS, 500, temperature=9.0, banned=(1, 3, 5))) == {0, 2, 4}
    assert set(tokens_drawn(LOGITS, 500, temperature=9.0, banned=(1, 3), top_k=2)) == {0, 2}


def test_tokens_ruled_out_by_an_infinite_logit_are_never_sampled():
    assert set(tokens_drawn(torch.tensor([-torch.inf, 0.0, -torch.inf]), 300, temperature=100.0)) == {1}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_no_number_has_no_answer_and_hurts_no_other(bad):
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    specs = [Sampling(position=7, seed=seed, temperature=0.7, num_logprobs=2) for seed in range(3)]
    alone = [sample(LOGITS[None], [spec])[0] for spec in specs]
    assert sample(logits, specs) == [alone[0], Sampled(NO_TOKEN), alone[2]]


def test_a_row_with_every_token_banned_has_no_answer():
    assert sample_one(LOGITS, banned=tuple(range(6))) == Sampled(NOTHING_ALLOWED)
    assert sample_one(torch.full((4,), -torch.inf)) == Sampled(NO_TOKEN)


def test_logprobs_are_of_the_raw_distribution():
    expected = torch.log_softmax(LOGITS.double(), 0)
    for spec in ({"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 2}, {"banned": (0, 4)}, {"top_p": 0.1}):
        sampled = sample_one(LOGITS, num_logprobs=3, **spec)
        assert sampled.logprob == pytest.approx(float(expected[sampled.token]), abs=1e-12)
        assert [token for token, _ in sampled.top] == [1, 3, 2]
        assert [value for _, value in sampled.top] == pytest.approx(expected[[1, 3, 2]].tolist())


def test_the_number_of_top_logprobs_is_as_asked_for():
    assert sample_one(LOGITS).logprob is None
    assert sample_one(LOGITS, num_logprobs=0).top == ()
    assert len(sample_one(LOGITS, num_logprobs=20).top) == 6


def test_likeliest_tokens_are_ranked_by_falling_logit_and_equals_by_rising_id():
    logits = [0.0, -0.0, 5.5, -3.0, -torch.inf, 5.5, -1e-38, 1e-38, -3.0, 0.0]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert [token for token, _ in sample_one(torch.tensor(logits), num_logprobs=10).top] == ranked


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 6), []) == []


def test_the_same_seed_and_position_give_the_same_token_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 5000, generator=generator) * 3
    specs = [
        Sampling(position=index * 3, seed=index, temperature=0.9, top_p=(0.8, 1.0)[index % 2], num_logprobs=4)
        for index in range(16)
    ]
    together = sample(logits, specs)
    assert together == [sample(logits[index : index + 1], [spec])[0] for index, spec in enumerate(specs)]
    assert together == sample(logits.flip(0), specs[::-1])[::-1]


def test_another_seed_or_position_gives_another_draw():
    logits = torch.zeros(10000)
    draws = {sample_one(logits, seed=seed, position=position).token for seed in range(8) for position in range(8)}
    assert len(draws) > 60


@pytest.mark.parametrize(
    "spec",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"banned": (1,)}],
)
def test_frequencies_match_the_distribution(spec):
    """Chi-square over 8,000 positions of one seed, at a fixed seed: the threshold is the 99.99 % quantile or more."""
    count = 8_000
    drawn = tokens_drawn(LOGITS, count, **spec)
    expected = plain_distribution(LOGITS.tolist(), Sampling(position=0, seed=0, **spec))
    assert set(drawn) <= {token for token, _ in expected}
    chi_square = sum((drawn[token] - count * p) ** 2 / (count * p) for token, p in expected)
    assert chi_square < 26


def test_frequencies_match_over_seeds_at_one_position():
    specs = [Sampling(position=100, seed=seed) for seed in range(8_000)]
    drawn = Counter(sampled.token for sampled in sample(LOGITS.expand(8_000, -1), specs))
    expected = torch.softmax(LOGITS.double(), 0).tolist()
    assert sum((drawn[token] - 8_000 * p) ** 2 / (8_000 * p) for token, p in enumerate(expected)) < 26


SPECS = st.builds(
    Sampling,
    position=st.integers(0, 10**6),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([1e-4, 0.1, 0.7, 1.0, 2.5]) | st.floats(0.01, 5.0),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.0]) | st.floats(0.0, 1.0),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    banned=st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
LOGIT = st.sampled_from([0.0, 1.0, -3.0, 88.0]) | st.floats(-60.0, 60.0, width=32)


@settings(max_examples=200, deadline=None)
@given(logits=st.lists(LOGIT, min_size=5, max_size=60), spec=SPECS)
def test_draws_equal_those_of_plain_python(logits, spec):
    expected = plain_distribution(logits, spec)
    # Where a bound falls on a token's edge to within rounding, either side is right: leave such cases out.
    full = plain_distribution(logits, replace(spec, top_p=1.0))
    cumulative = [math.fsum(p for _, p in full[: place + 1]) for place in range(len(full))]
    assume(spec.top_p == 1.0 or all(abs(bound - spec.top_p) > 1e-9 for bound in cumulative))
    weights = plain_distribution(logits, replace(spec, top_p=1.0, top_k=0, min_p=0.0))
    assume(all(abs(p / weights[0][1] - spec.min_p) > 1e-9 for _, p in weights[1:] if spec.min_p))
    share = uniform(spec.seed, spec.position)
    edges = [math.fsum(p for _, p in expected[: place + 1]) for place in range(len(expected))]
    assume(all(abs(edge - share) > 1e-9 for edge in edges))
    place = next(place for place, edge in enumerate(edges) if edge > share)
    assert sample(torch.tensor([logits]), [spec])[0].token == expected[place][0]


def test_large_vocabularies_are_drawn_like_small_ones():
    """Ranking stops early where it can: the draws must be those of the whole ranking, flat or peaked."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.5, 2.0, 6.0):
        logits = torch.randn(3000, generator=generator) * scale
        for index, (top_p, top_k) in enumerate([(1.0, 0), (0.9, 0), (0.999, 0), (1.0, 500), (0.9, 2999)] * 4):
            spec = Sampling(position=index, seed=9, top_p=top_p, top_k=top_k)
            ranked = plain_distribution(logits.tolist(), spec)
            edges = accumulate(p for _, p in ranked)
            place = next(place for place, edge in enumerate(edges) if edge > uniform(9, index))
            assert sample(logits[None], [spec])[0].token == ranked[place][0]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_answers(counter, key, expected):
    """The known answers that the authors of Philox publish with their Random123 library."""
    assert philox(counter, key) == expected


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**63))
def test_uniform_numbers_lie_in_the_half_open_unit_interval(seed, position):
    assert 0.0 <= uniform(seed, position) < 1.0


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_not_correlated():
    grid = torch.tensor([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert abs(float(grid.mean()) - 0.5) < 0.01
    centred = grid - 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean()) * 12) < 0.03
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean()) * 12) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 3, 200, 1000])
def test_choosing_among_allowed_tokens_only_is_choosing_with_the_others_excluded(
    temperature: float, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    for position in range(30):
        logits = torch.randn(1000, generator=generator).mul(4).round()  # with ties
        allowed = sorted(torch.randperm(1000, generator=generator)[:count].tolist())
        mask = np.packbits(np.isin(np.arange(1000), allowed), bitorder="little").tobytes()
        options = {"position": position, "seed": 5, "temperature": temperature, "top_p": 0.9, "allowed": mask}
        banned = (allowed[0],) if count > 1 else ()
        expected = logits.clone()
        expected[[token for token in range(1000) if token not in allowed or token in banned]] = -torch.inf
        spec = Sampling(**options, banned=banned)
        plain = Sampling(position=position, seed=5, temperature=temperature, top_p=0.9)
        assert sample(logits[None], [spec]) == sample(expected[None], [plain])
        with_logprobs = sample(logits[None], [replace(spec, num_logprobs=0)])
        assert with_logprobs[0].token == sample(logits[None], [spec])[0].token


def test_nothing_allowed_is_told_apart_from_a_broken_model() -> None:
    logits = torch.zeros(1, 16)
    for spec in (
        Sampling(position=0, seed=0, allowed=b""),
        Sampling(position=0, seed=0, allowed=b"\1", banned=(0,)),
        Sampling(position=0, seed=0, temperature=0.0, allowed=b"\0\0"),
    ):
        assert sample(logits, [spec])[0].token == NOTHING_ALLOWED
