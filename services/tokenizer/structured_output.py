"""Structured output: what a request asks for becomes a grammar, checked before the request is accepted. Pure.

Grammars are in llguidance's form. What cannot be honoured exactly is refused with its cause: output never goes
unconstrained where a constraint was asked for.
"""

import json
from dataclasses import replace
from typing import Any, Literal, TypeVar

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from schemas.codec import validation_error
from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from services.tokenizer.grammar_check import MAX_GRAMMAR_CHARS, GrammarSource, refused
from services.tokenizer.json_schemas import SchemaRefused, engine_schema

MAX_CHOICES = 1024
P = TypeVar("P", bound=BaseModel)
JSON_OPTIONS: Any = {"lenient": False, "whitespace_pattern": r"[ \n]{0,16}", "json_allowed_escapes": 'nrbtf\\"'}
"""No keyword is passed over; whitespace is bounded, because small models never tire of it; a name cannot be written in
another way (\\u0061 for a), which would hide it from the schema."""


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)


class _JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str | None = None
    body: dict[str, JsonValue] | bool = Field(alias="schema")
    strict: bool | None = None


class _ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(_Options):
    body: dict[str, JsonValue] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Older names of single options → those of `structured_outputs`."""


def asks_for_form(request: GenerateRequest) -> bool:
    """Tell whether anything in a request can bind its answer: without it there is nothing to look at closely."""
    options = ("response_format", "structured_outputs", "tools", *GUIDED)
    return any(getattr(request, name) is not None for name in options)


def grammar_of(request: GenerateRequest) -> GrammarSource | None:
    """Return the grammar that the request asks for, None for free text; raises InvalidParameter."""
    found = [source for source in (_response_format(request), *_structured_outputs(request)) if source is not None]
    if len(found) > 1:
        raise InvalidParameter(f"{found[0].param} and {found[1].param} exclude each other.", param=found[1].param)
    return found[0] if found else None


def json_grammar(schema: dict[str, Any] | bool, param: str) -> GrammarSource:
    """Return the grammar of JSON that a schema accepts."""
    if schema is False:
        raise InvalidParameter(f"The schema of {param} accepts nothing.", param=param)
    bound = bound_schema({} if schema is True else schema, param)
    return replace(bound, text=LLMatcher.grammar_from_json_schema(bound.text))


def bound_schema(schema: dict[str, Any], param: str) -> GrammarSource:
    """Return a schema, as JSON, that the grammar engine follows to the letter; raises InvalidParameter."""
    try:
        followed = engine_schema(schema)
    except SchemaRefused as error:
        raise refused(param, str(error)) from None
    return GrammarSource(json.dumps({**followed.body, "x-guidance": JSON_OPTIONS}), param, followed.patterns)


def _response_format(request: GenerateRequest) -> GrammarSource | None:
    if request.response_format is None:
        return None
    asked = _parsed(_ResponseFormat, request.response_format, "response_format")
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_grammar({"type": "object"}, "response_format")
    if asked.json_schema is None:
        raise InvalidParameter("response_format of type json_schema needs 'json_schema'.", param="response_format")
    return json_grammar(asked.json_schema.body, "response_format")


def _structured_outputs(request: GenerateRequest) -> list[GrammarSource | None]:
    sources: list[GrammarSource | None] = []
    if request.structured_outputs is not None:
        sources.append(_one_of(request.structured_outputs, "structured_outputs"))
    for name, option in GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            sources.append(_one_of({option: value}, name))
    return sources


def _one_of(fields: dict[str, JsonValue], param: str) -> GrammarSource | None:
    asked = _parsed(_StructuredOutputs, {name: value for name, value in fields.items() if value is not None}, param)
    if len(asked.model_fields_set) != 1:
        raise InvalidParameter(f"{param} must have exactly one of {', '.join(GUIDED.values())}.", param=param)
    if asked.regex is not None:
        return GrammarSource(LLMatcher.grammar_from_regex(asked.regex), param)
    if asked.choice is not None:
        return GrammarSource(_choice_grammar(asked.choice, param), param)
    if asked.grammar is not None:
        return GrammarSource(_lark_grammar(asked.grammar, param), param)
    if asked.json_object is not None:
        return json_grammar({"type": "object"}, param) if asked.json_object else None
    return json_grammar(_schema_of(asked.body, param), param)


def _schema_of(body: dict[str, JsonValue] | bool | str | None, param: str) -> dict[str, JsonValue] | bool:
    """A schema may be given as JSON text."""
    if not isinstance(body, str):
        return body if body is not None else True
    try:
        schema = json.loads(body)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, (dict, bool)):
        raise InvalidParameter(f"The JSON schema of {param} is no JSON object.", param=param)
    return schema


def _choice_grammar(choices: tuple[str, ...], param: str) -> str:
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidParameter(
            f"The choices of {param} must be 1 to {MAX_CHOICES} texts, none of them empty.", param=param
        )
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _lark_grammar(text: str, param: str) -> str:
    """Both Lark's and GBNF's notation are taken."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidParameter(f"The grammar of {param} has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises plain ones for what it cannot read
        raise refused(param, str(error)) from None


def _parsed(kind: type[P], fields: dict[str, JsonValue], param: str) -> P:
    try:
        return kind.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        inner = validation_error(error)
        raise InvalidParameter(f"{param}: {inner.message}", param=param) from None
