"""JSON schemas before they become grammars: what the grammar engine would not follow to the letter. Pure.

Every keyword is followed exactly or refused by name and place. The engine (llguidance) refuses most of what it does
not know by itself; this file adds what it passes over, takes too lightly or cannot take at all, and rewrites what it
can follow in another form. Keywords that restrict nothing are removed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from services.tokenizer.schema_patterns import FORMAT_PATTERNS, PatternRefused, engine_pattern

MAX_NUMBER = 2**53
"""Beyond it, JSON's numbers are not exact everywhere, and the engine computes bounds with rounded ones."""
MAX_HOSTNAME_CHARS = 253
MAX_STEPS = 20_000
"""Remainders that the engine tells apart for 'multipleOf': its time grows with their square."""

Schema = dict[str, Any]


class SchemaRefused(ValueError):
    """The schema cannot be followed; the message names the keyword and its place."""


@dataclass(frozen=True, slots=True)
class EngineSchema:
    """A schema that the grammar engine follows exactly, and its regular expressions, each with its place."""

    body: Schema
    patterns: tuple[tuple[str, str], ...]


def engine_schema(schema: Schema) -> EngineSchema:
    """Return what the grammar engine is to follow when `schema` is asked for; raises SchemaRefused."""
    try:
        copy: Schema = json.loads(json.dumps(schema))
    except (ValueError, RecursionError):
        raise SchemaRefused("it is nested too deeply") from None
    patterns: list[tuple[str, str]] = []
    todo: list[tuple[str, Any]] = [("#", copy)]
    seen: set[int] = set()
    while todo:
        place, node = todo.pop()
        if isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            _prepare(node, place, patterns)
            todo += _children(node, place, copy)
    return EngineSchema(copy, tuple(patterns))


# ---- where schemas are within a schema

ONE = ("items", "additionalItems", "additionalProperties")
MANY = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def _children(node: Schema, place: str, root: Schema) -> Iterator[tuple[str, Any]]:
    yield from ((f"{place}/{keyword}", node[keyword]) for keyword in ONE if keyword in node)
    for keyword in MANY:
        if isinstance(node.get(keyword), list):
            yield from ((f"{place}/{keyword}/{index}", child) for index, child in enumerate(node[keyword]))
    for keyword in NAMED:
        if isinstance(node.get(keyword), dict):
            yield from ((f"{place}/{keyword}/{name}", child) for name, child in node[keyword].items())
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and "$id" not in root:
        target = _at(reference, root)
        if target is None:
            raise SchemaRefused(f"the '$ref' at {place} points to nothing")
        yield reference, target


def _at(pointer: str, root: Any) -> Any:
    """What a JSON pointer (RFC 6901, as a URI fragment) points to; None where there is nothing."""
    for step in unquote(pointer).removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


# ---- what is done to one of them


def _prepare(node: Schema, place: str, patterns: list[tuple[str, str]]) -> None:
    for keyword in [keyword for keyword in node if keyword in UNSUPPORTED]:
        if not UNSUPPORTED[keyword](node):
            raise SchemaRefused(f"the keyword {keyword!r} at {place} is not supported")
        del node[keyword]
    _check_lists(node, place)
    _check_numbers(node, place)
    _check_values(node, place)
    _check_min_properties(node, place)
    _translate_patterns(node, place, patterns)
    _tighten_format(node, place)


def _restricts_nothing(keyword: str) -> Callable[[Schema], bool]:
    return lambda node: node[keyword] in (True, {})


def _has_no_entries(keyword: str) -> Callable[[Schema], bool]:
    return lambda node: node[keyword] == {}


def _is_alone(keyword: str) -> Callable[[Schema], bool]:
    return lambda node: keyword not in node


def _is_unique_anyway(node: Schema) -> bool:
    return node["uniqueItems"] is False or node.get("maxItems") in (0, 1)


def _never(node: Schema) -> bool:
    return False


UNSUPPORTED: dict[str, Callable[[Schema], bool]] = {
    "not": _never,
    "then": _is_alone("if"),
    "else": _is_alone("if"),
    "if": lambda node: "then" not in node and "else" not in node,
    "minContains": _is_alone("contains"),
    "maxContains": _is_alone("contains"),
    "contains": _never,
    "uniqueItems": _is_unique_anyway,
    "propertyNames": _restricts_nothing("propertyNames"),
    "unevaluatedItems": _restricts_nothing("unevaluatedItems"),
    "unevaluatedProperties": _restricts_nothing("unevaluatedProperties"),
    "dependentRequired": _has_no_entries("dependentRequired"),
    "dependentSchemas": _has_no_entries("dependentSchemas"),
    "dependencies": _has_no_entries("dependencies"),
    "$dynamicRef": _never,
    "$recursiveRef": _never,
    "$dynamicAnchor": lambda node: True,
    "$recursiveAnchor": lambda node: True,
    "x-guidance": lambda node: True,
}
"""Keyword → whether it restricts nothing in a schema that has it."""


def _check_lists(node: Schema, place: str) -> None:
    for keyword in ("enum", "anyOf", "oneOf", "type"):
        if node.get(keyword) == []:
            raise SchemaRefused(f"{keyword!r} at {place} is empty")
    items = node.get("items")
    if isinstance(items, list) and "prefixItems" in node:
        raise SchemaRefused(f"'items' at {place} is a list beside 'prefixItems'")


UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")


def _check_numbers(node: Schema, place: str) -> None:
    """Bounds beyond the exact numbers become the last exact ones: what follows those follows these."""
    for keyword in (*UPPER, *LOWER, "multipleOf"):
        if keyword == "multipleOf" and _num_steps(node.get(keyword)) > MAX_STEPS:
            raise SchemaRefused(f"'multipleOf' at {place} has too many digits")
        if not _is_too_large(node.get(keyword)):
            continue
        is_upper = keyword in UPPER
        if keyword == "multipleOf" or is_upper != (node[keyword] > 0):
            raise SchemaRefused(f"{keyword!r} at {place} is beyond 2^53")
        del node[keyword]
        inner = UPPER[0] if is_upper else LOWER[0]
        if not _is_number(node.get(inner)):
            node[inner] = MAX_NUMBER if is_upper else -MAX_NUMBER


def _num_steps(divisor: Any) -> int:
    """The digits of a divisor as one number: 12.5 has 125 of them."""
    return int("".join(map(str, Decimal(str(divisor)).normalize().as_tuple().digits))) if _is_number(divisor) else 0


def _check_values(node: Schema, place: str) -> None:
    for keyword in ("const", "enum"):
        for value in _values_within(node.get(keyword)):
            if _is_too_large(value):
                raise SchemaRefused(f"{keyword!r} at {place} has a number beyond 2^53")
            if isinstance(value, str) and any(_is_control(character) for character in value):
                raise SchemaRefused(f"{keyword!r} at {place} has a control character")


def _values_within(value: Any) -> Iterator[Any]:
    """A JSON value and everything in it."""
    todo = [value]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += [*value, *value.values()]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_too_large(value: Any) -> bool:
    return _is_number(value) and not -MAX_NUMBER <= value <= MAX_NUMBER


def _is_control(character: str) -> bool:
    return (character < " " and character not in "\n\r\t\b\f") or character == "\x7f"


def _check_min_properties(node: Schema, place: str) -> None:
    """Names that are not listed may come twice in a text, and count once."""
    least, required = node.get("minProperties"), node.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if _is_number(least) and least > max(1, num_required) and not is_closed:
        raise SchemaRefused(f"'minProperties' at {place} is above 1 for names that are not required")


def _translate_patterns(node: Schema, place: str, patterns: list[tuple[str, str]]) -> None:
    if isinstance(node.get("pattern"), str):
        where = f"'pattern' at {place}"
        node["pattern"] = _translated(node["pattern"], where)
        patterns.append((where, node["pattern"]))
    if isinstance(node.get("patternProperties"), dict):
        where = f"'patternProperties' at {place}"
        named = node["patternProperties"].items()
        node["patternProperties"] = {_translated(pattern, where): child for pattern, child in named}
        patterns += [(where, pattern) for pattern in node["patternProperties"]]


def _translated(pattern: str, where: str) -> str:
    try:
        return engine_pattern(pattern)
    except PatternRefused as refused:
        raise SchemaRefused(f"the {where}: {refused}") from None


def _tighten_format(node: Schema, place: str) -> None:
    name = node.get("format")
    if name == "hostname":
        longest = node.get("maxLength")
        node["maxLength"] = min(longest, MAX_HOSTNAME_CHARS) if _is_number(longest) else MAX_HOSTNAME_CHARS
    elif name == "unknown":  # a name that the engine takes for its own
        raise SchemaRefused(f"the 'format' at {place} is not supported")
    elif isinstance(name, str) and name in FORMAT_PATTERNS:
        del node["format"]
        pattern = {"pattern": FORMAT_PATTERNS[name]}
        if "pattern" not in node:
            node |= pattern
        elif isinstance(node.setdefault("allOf", []), list):
            node["allOf"] = [*node["allOf"], pattern]
