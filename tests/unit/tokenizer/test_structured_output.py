"""Structured output: every way to ask becomes a grammar that is checked, or an error that names the option."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidParameter, UnsupportedParameter
from schemas.generation import GenerateRequest
from services.tokenizer.grammar_check import GrammarCheck
from services.tokenizer.structured_output import grammar_of
from tests.unit.tokenizer.grammars import BYTES, CHECK, accepts

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def source(**fields: Any) -> str:
    request = GenerateRequest.model_validate_json(json.dumps({"prompt": "x", **fields}))
    found = grammar_of(request)
    assert found is not None
    CHECK.check(found)
    return found.text


def follows(text: str, **fields: Any) -> bool:
    return accepts(source(**fields), text)


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"response_format": json_schema(SCHEMA)}, '{"n": 12}', '{"n": "12"}'),
        ({"response_format": json_schema({})}, "[1]", "x"),
        ({"structured_outputs": {"json": SCHEMA}}, '{\n  "n" : 1\n}', '{"n": 1, "m": 2}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"n": 1}', "{}"),
        ({"structured_outputs": {"json": True}}, "null", "nil"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "a/b\\d+", "choice": None}}, "a/b12", "a/b"),
        ({"structured_outputs": {"choice": ['a"b', "c\nd", "é"]}}, "c\nd", "c"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes", "maybe"),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, "aaa", "b"),
        ({"guided_json": SCHEMA}, '{"n": 1}', "{}"),
        ({"guided_regex": "[ab]"}, "a", "c"),
        ({"guided_choice": ["x", "y"]}, "y", "z"),
        ({"guided_grammar": 'start: "a"'}, "a", "b"),
        ({"guided_json_object": True}, "{}", "[]"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_text_that_follows_is_told_from_text_that_does_not(fields: dict[str, Any], right: str, wrong: str) -> None:
    assert follows(right, **fields)
    assert not follows(wrong, **fields)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}]
)
def test_free_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(GenerateRequest.model_validate({"prompt": "x", **fields})) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}},
        {"response_format": json_schema(123)},
        {"response_format": json_schema("{}")},
        {"response_format": json_schema(False)},
        {"response_format": json_schema({"type": "string", "pattern": "(?=a)b"})},
        {"response_format": json_schema({"type": "object", "propertyNames": {"pattern": "^a"}})},
        {"response_format": json_schema({"not": {}})},
        {"response_format": json_schema({"x-guidance": {"lenient": True}, "not": {}})},
        {"response_format": json_schema({"$ref": "http://127.0.0.1:9/schema"})},
        {"response_format": json_schema({"type": "integer", "minimum": 5, "maximum": 3})},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"something": 1}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": 7}},
        {"structured_outputs": {"json": "not json"}},
        {"structured_outputs": {"json": "[" * 100_000}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [""]}},
        {"structured_outputs": {"choice": ["a"] * 2000}},
        {"structured_outputs": {"grammar": "start: ("}},
        {"structured_outputs": {"grammar": ""}},
        {"structured_outputs": {"grammar": "\0"}},
        {"structured_outputs": {"grammar": "root ::= " + "(" * 10_000}},
        {"structured_outputs": {"choice": ["x" * 300_000]}},
    ],
    ids=lambda value: json.dumps(value)[:80],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as refused:
        source(**fields)
    assert refused.value.param == next(iter(fields))
    assert len(refused.value.message) < 1000


def test_two_ways_at_once_exclude_each_other() -> None:
    with pytest.raises(InvalidParameter) as refused:
        source(response_format={"type": "json_object"}, guided_regex="a")
    assert refused.value.param == "guided_regex"


def test_a_backend_that_is_switched_off_refuses_by_name() -> None:
    found = grammar_of(GenerateRequest(prompt="x", guided_regex="a"))
    assert found is not None
    with pytest.raises(UnsupportedParameter) as refused:
        GrammarCheck(BYTES, is_enabled=False).check(found)
    assert refused.value.param == "guided_regex"
