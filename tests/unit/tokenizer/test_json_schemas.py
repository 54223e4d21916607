"""JSON schemas before they become grammars: exact, rewritten, or refused by keyword and place."""

from typing import Any

import pytest

from schemas.errors import InvalidParameter
from services.tokenizer.json_schemas import SchemaRefused, engine_schema
from services.tokenizer.structured_output import json_grammar
from tests.unit.tokenizer import grammars
from tests.unit.tokenizer.grammars import CHECK

INTEGER = {"type": "integer"}


def accepts(schema: Any, text: str) -> bool:
    source = json_grammar(schema, "it")
    CHECK.check(source)
    return grammars.accepts(source.text, text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "properties": {"a": INTEGER}}, '{"a": 1}', '{"\\u0061": "x"}'),
        ({"type": "object", "patternProperties": {"^a": INTEGER}}, '{"b": "x"}', '{"\\u0061": "x"}'),
        ({"format": "hostname"}, '"a.b"', '"' + ".".join(["a" * 60] * 5) + '"'),
        ({"format": "hostname", "maxLength": 3}, '"a.b"', '"a.bc"'),
        ({"format": "date", "pattern": "^20"}, '"2024-02-29"', '"1924-02-29"'),
        ({"format": "date", "pattern": "^20", "allOf": [{"pattern": "9$"}]}, '"2024-02-29"', '"2024-02-28"'),
        ({**INTEGER, "minimum": -(2**63), "maximum": 2**64}, str(2**53), str(2**53 + 1)),
        ({**INTEGER, "exclusiveMaximum": 2**60, "maximum": 7}, "7", "8"),
        ({"type": "array", "items": INTEGER, "uniqueItems": False}, "[1, 1]", '["a"]'),
        ({**INTEGER, "if": {}, "x-guidance": {"lenient": True}, "propertyNames": {}}, "1", '"a"'),
    ],
    ids=str,
)
def test_schemas_are_followed_to_the_letter(schema: Any, right: str, wrong: str) -> None:
    assert accepts(schema, right)
    assert not accepts(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"anyOf": [{"not": {}}]}, "'not' at #/anyOf/0"),
        ({"properties": {"a": {"items": {"contains": {}}}}}, "'contains' at #/properties/a/items"),
        ({"prefixItems": [{}, {"propertyNames": False}]}, "'propertyNames' at #/prefixItems/1"),
        ({"x": {"y": [{"not": {}}]}, "$ref": "#/x/y/0"}, "'not' at #/x/y/0"),
        ({"x": [], "$ref": "#/x/y/0"}, "'$ref' at #"),
        ({"x": [1], "$ref": "#/x/3"}, "'$ref' at #"),
        ({"patternProperties": {"(?i)a": {}}}, "'patternProperties' at #"),
        ({"additionalProperties": {"pattern": "("}}, "'pattern' at #/additionalProperties"),
        ({"const": [{"a": -(2**63)}]}, "'const' at #"),
        ({"enum": [["\x00"]]}, "'enum' at #"),
        ({"minimum": 2**53 + 1}, "'minimum' at #"),
        ({"minProperties": 2, "required": ["a"]}, "'minProperties' at #"),
    ],
    ids=str,
)
def test_a_refusal_names_keyword_and_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        CHECK.check(json_grammar(schema, "it"))
    assert place in refused.value.message


def test_schemas_that_refer_to_themselves_are_walked_once() -> None:
    schema = {"properties": {"next": {"$ref": "#"}, "a": {"$ref": "#/properties/a"}}}
    assert engine_schema(schema).body == schema


def test_what_is_no_schema_is_left_to_the_engine() -> None:
    assert engine_schema({"properties": [], "items": 5}).body == {"properties": [], "items": 5}


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(SchemaRefused):
        engine_schema(schema)
