"""Options that say how tokens are chosen: resolved to token ids, or refused by name."""

from typing import Any

import pytest

from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from schemas.sampling import SamplingParams
from services.tokenizer.sampling_options import check_sampling, resolve_sampling
from services.tokenizer.vocabulary import BYTE_VOCABULARY_END, byte_vocabulary

BYTES = byte_vocabulary()


def resolved(**fields: Any) -> SamplingParams:
    request = GenerateRequest.model_validate({"prompt": "x", **fields})
    check_sampling(request, BYTES)
    return resolve_sampling(request, BYTES, random_seed=7)


def test_options_left_out_are_off() -> None:
    params = resolved()
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ((), (), ())


def test_options_are_resolved_to_tokens() -> None:
    params = resolved(
        presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=1.5, logit_bias={"65": -100, "0": 1.5},
        allowed_token_ids=(3, 1, 3), bad_words=("ab",),
    )  # fmt: skip
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 2, 1.5)
    assert params.logit_bias == ((65, -100.0), (0, 1.5))
    assert params.allowed_token_ids == (3, 1)
    assert params.bad_words == (tuple(b"ab"), tuple(b" ab"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": {str(token): 1.0 for token in range(2000)}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (257,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * 10_000}, "allowed_token_ids"),
        ({"allowed_token_ids": (BYTE_VOCABULARY_END,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (97,), "bad_words": ("a",)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": ("x" * 300,)}, "bad_words"),
        ({"bad_words": ("x",) * 300}, "bad_words"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_names_the_option(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        resolved(**fields)
    assert refused.value.param == param
