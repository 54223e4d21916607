"""Errors as they travel."""

import pytest

from schemas.errors import BY_CODE, ErrorBody, InternalError, NatterjackError, from_body


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
def test_error_is_the_same_after_travelling(kind: type[NatterjackError]) -> None:
    error = kind("what happened", param="field", limit=3, names=["a"])
    back = from_body(ErrorBody.model_validate_json(error.body().model_dump_json()))
    assert type(back) is kind
    assert (back.message, back.param, back.details) == ("what happened", "field", {"limit": 3, "names": ["a"]})


def test_unknown_code_from_a_newer_version_is_an_internal_error_with_its_message() -> None:
    back = from_body(ErrorBody(message="out of frogs", type="x", code="out_of_frogs"))
    assert type(back) is InternalError
    assert back.message == "out of frogs"


@pytest.mark.parametrize("name", ["message", "param", "self"])
def test_details_may_have_any_name(name: str) -> None:
    back = from_body(ErrorBody(message="m", type="x", code="conflict", details={name: 1}))
    assert back.details == {name: 1}
