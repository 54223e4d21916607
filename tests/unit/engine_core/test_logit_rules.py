"""Options that act on logits: exact against the definition in plain Python, in vLLM's order, alone in their row."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.batch import Penalties, Sampling
from engine_core.logit_rules import allowed_tokens, ruled
from engine_core.sampling import sample

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
some_tokens = st.lists(tokens, max_size=20).map(tuple)
penalties = st.builds(
    Penalties,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    prompt=some_tokens,
    generated=some_tokens,
)
specs = st.builds(
    Sampling,
    position=st.just(5),
    seed=st.just(3),
    banned=some_tokens,
    allowed=st.none() | st.binary(max_size=3),
    bias=st.dictionaries(tokens, st.floats(-100, 100)).map(lambda bias: tuple(bias.items())),
    penalties=st.none() | penalties,
)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)


def by_definition(logits: list[float], spec: Sampling) -> list[float]:
    out = list(logits)
    for token in range(VOCAB):
        mask = spec.allowed
        if mask is not None and not (token // 8 < len(mask) and mask[token // 8] >> token % 8 & 1):
            out[token] = -math.inf
        if token in spec.banned:
            out[token] = -math.inf
        out[token] += dict(spec.bias).get(token, 0.0)
        if spec.penalties is not None:
            counts = Counter(spec.penalties.generated)
            if token in counts or token in spec.penalties.prompt:
                factor = spec.penalties.repetition
                out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
            out[token] -= spec.penalties.frequency * counts[token] + spec.penalties.presence * (token in counts)
    return out


@settings(deadline=None)
@given(logit_rows, specs)
def test_options_do_what_they_say(logits: list[float], spec: Sampling) -> None:
    before = torch.tensor(logits)
    after = ruled(before, spec)
    assert before.tolist() == torch.tensor(logits).tolist()
    expected = torch.tensor(by_definition(before.tolist(), spec))
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-4)


@settings(deadline=None)
@given(logit_rows, st.lists(specs, min_size=1, max_size=4))
def test_a_row_is_chosen_as_if_it_were_alone(logits: list[float], several: list[Sampling]) -> None:
    row = torch.tensor(logits)
    together = sample(row.expand(len(several), -1), several)
    assert together == [sample(row[None], [spec])[0] for spec in several]


def test_a_plain_row_needs_no_rule() -> None:
    assert Sampling(position=1, seed=0, temperature=0.0, top_k=3).is_plain
    for option in ({"banned": (1,)}, {"allowed": b""}, {"bias": ((1, 2.0),)}, {"num_logprobs": 0}):
        assert not Sampling(position=1, seed=0, **option).is_plain


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_tokens_beyond_the_mask_are_not_allowed(size: int) -> None:
    assert allowed_tokens(b"\xff" * size, VOCAB).tolist() == [token < 8 * size for token in range(VOCAB)]


def test_an_allowed_token_is_forced_and_its_logprob_stays_raw() -> None:
    logits = torch.tensor([5.0, 0.0, 1.0])
    [sampled] = sample(logits[None], [Sampling(position=0, seed=0, allowed=b"\x02", num_logprobs=1)])
    assert sampled.token == 1
    assert sampled.logprob == pytest.approx(float(torch.log_softmax(logits.double(), 0)[1]))
    assert sampled.top[0][0] == 0
