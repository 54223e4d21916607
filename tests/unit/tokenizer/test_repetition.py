"""Which requests are the same: what is asked counts, not how it was sent."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from services.tokenizer.repetition import check_is_repeated, digest_of


def digest(**fields: Any) -> str:
    return digest_of(GenerateRequest.model_validate_json(json.dumps({"prompt": "hi", **fields})))


def test_how_a_request_is_sent_does_not_count() -> None:
    sent_otherwise: Any = {"request_id": "r", "model": "m", "timeout_s": 3, "deliver": "log", "resume": True}
    assert digest(**sent_otherwise, is_new_id=True, unknown=[1], n=1) == digest()


def test_the_order_of_keys_does_not_count() -> None:
    assert digest(n=2, logit_bias={"1": 2, "3": 4}) == digest(logit_bias={"3": 4, "1": 2}, n=2)


@pytest.mark.parametrize("change", [{"prompt": "Hi"}, {"prompt": [1]}, {"n": 2}, {"seed": 1}, {"echo": True}])
def test_whatever_is_asked_counts(change: dict[str, Any]) -> None:
    assert digest(**change) != digest()


def test_only_a_known_other_request_is_refused() -> None:
    check_is_repeated("r", "a", "a")
    check_is_repeated("r", "a", "")
    with pytest.raises(InvalidParameter, match="'r' was used before, for another request"):
        check_is_repeated("r", "a", "b")


def test_what_only_the_validation_refuses_has_a_digest_all_the_same() -> None:
    asked = GenerateRequest(prompt="Hi", max_tokens=2**80)
    assert digest_of(asked) != digest_of(GenerateRequest(prompt="Hi"))
