"""Builds a frozen settings model from what was given: defaults < file < environment < `--set`.

A value that nobody knows is an error with a suggestion, wherever it was given; each remembers its source.
Knows no particular setting: those are in settings.py and in each service's settings.py.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from schemas.control import ROLES, ConfigValue
from services.runtime.setting_sources import (
    Given,
    SettingsError,
    Source,
    environment_name,
    from_environment,
    from_file,
    from_overrides,
)

MASK = "********"
_URL_SECRET = re.compile(r"(?<=://)[^@/\s]+(?=@)")
_OTHER_SECTIONS = frozenset({*ROLES, "console", "supervisor"})
"""Sections that a single service may find in the pipeline's file and leaves to their owners."""


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings, and for each dotted key where its value came from."""

    settings: S
    sources: Mapping[str, Source]

    def shown(self) -> dict[str, ConfigValue]:
        """Return every key with its value and source, secrets masked: what may be printed or published."""
        values = masked(self.settings)
        return {key: ConfigValue(value=values[key], source=self.sources[key]) for key in values}


def load(
    kind: type[S],
    *,
    file: Path | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str],
) -> Loaded[S]:
    """Return the settings of `kind`; raise SettingsError that names every problem.

    `overrides` are `key=value` texts, the value a YAML scalar. Sections of other roles are skipped when
    `kind` lacks them.
    """
    keys = known_keys(kind)
    sections = {key.rsplit(".", 1)[0] for key in keys} | _OTHER_SECTIONS
    given: list[Given] = []
    if file is not None:
        given += from_file(file, sections.__contains__)
    given += from_environment(environ)
    given += from_overrides(overrides)
    given = [value for value in given if _concerns(kind, value.key)]
    problems = [problem for value in given if (problem := _unknown(value, keys, sections))]
    if problems:
        raise SettingsError("\n".join(problems))
    last = {value.key: value for value in given}
    settings = _validate(kind, {key: (_read(value, keys[key]), value) for key, value in last.items()}, keys)
    sources: dict[str, Source] = {key: last[key].source if key in last else "default" for key in keys}
    return Loaded(settings, sources)


def known_keys(kind: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every dotted key of a settings model with its field."""
    keys: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys.update(known_keys(field.annotation, f"{prefix}{name}."))
        else:
            keys[f"{prefix}{name}"] = field
    return keys


def _concerns(kind: type[Section], key: str) -> bool:
    top = key.partition(".")[0]
    return top in kind.model_fields or top not in _OTHER_SECTIONS


def _unknown(value: Given, keys: Mapping[str, FieldInfo], sections: set[str]) -> str | None:
    if value.key in keys:
        return None
    if value.key in sections:
        return f"'{value.key}' is a section with keys below it, not a value ({value.where})."
    nearest = _nearest(value.key, [*keys, *sections])
    if nearest and value.source == "environment":
        nearest = environment_name(nearest)
    hint = f" Did you mean '{nearest}'?" if nearest else " 'natterjack config show' lists the keys."
    return f"Unknown setting '{value.key}' ({value.where}).{hint}"


def _nearest(key: str, keys: Iterable[str]) -> str | None:
    """Return the known key that was most likely meant: a similar one, or one with the same last part."""
    keys = list(keys)
    matches = difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.75)
    last = key.lower().replace("-", "_").rsplit(".", 1)[-1]
    matches += [known for known in keys if known.rsplit(".", 1)[-1] == last]
    return matches[0] if matches else None


def _read(value: Given, field: FieldInfo) -> Any:
    """Return a value ready for validation: text is read as a YAML scalar, except where text is wanted."""
    if not value.is_text:
        return value.value
    kinds = set(get_args(field.annotation)) or {field.annotation}
    if kinds & {str, SecretStr, Path}:
        return None if type(None) in kinds and value.value in {"", "null", "~"} else value.value
    try:
        return yaml.safe_load(value.value)
    except yaml.YAMLError:
        return value.value


def _validate(kind: type[S], values: Mapping[str, tuple[Any, Given]], keys: Mapping[str, FieldInfo]) -> S:
    tree: dict[str, Any] = {}
    problems = []
    for key, (read, value) in values.items():
        if isinstance(read, bool) and keys[key].annotation in {int, float}:
            problems.append(_complain(key, value, keys, "Input should be a number"))
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = read
    try:
        settings = kind.model_validate(tree)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = _key_of(item["loc"], keys)
            problems.append(_complain(key, values[key][1] if key in values else None, keys, item["msg"]))
        settings = None
    if problems or settings is None:
        raise SettingsError("\n".join(problems))
    return settings


def _key_of(location: tuple[int | str, ...], keys: Mapping[str, FieldInfo]) -> str:
    """Return the dotted key that a pydantic location lies in (it may go deeper, into a union or a list)."""
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in keys:
            return ".".join(parts[:end])
    return ".".join(parts)


def _complain(key: str, value: Given | None, keys: Mapping[str, FieldInfo], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if value is None:
        return f"'{key}': {message}." if key else f"{message}."
    shown = MASK if key in keys and _is_secret(keys[key]) else repr(masked(value.value))
    return f"'{key}' cannot be {shown} ({value.where}): {message}."


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in (set(get_args(field.annotation)) or {field.annotation})


def masked(value: Any) -> Any:
    """Return a value as JSON that may be shown: secrets, and passwords in URLs, become asterisks.

    Of a settings model: every value by its dotted key.
    """
    if isinstance(value, BaseModel):
        return {key: masked(_value_at(value, key)) for key in known_keys(type(value))}
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return _URL_SECRET.sub(MASK, value)
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    if isinstance(value, dict):
        return {str(key): masked(item) for key, item in value.items()}
    return value


def _value_at(settings: BaseModel, key: str) -> Any:
    node: Any = settings
    for part in key.split("."):
        node = getattr(node, part)
    return node
