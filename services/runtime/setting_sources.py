"""Reads configuration values from a YAML file, environment variables and `--set`, each with where it stood.

Knows nothing of which keys exist or what they mean; settings.py decides that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Source = Literal["default", "file", "environment", "--set"]

ENVIRONMENT_PREFIX = "NATTERJACK_"


class SettingsError(Exception):
    """The configuration is wrong; the message names every problem and what to do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Given:
    """One value that somebody gave: `key` is dotted (`gateway.port`), `where` is for a person.

    `is_text` marks a value that came as text (environment, `--set`) and has not been read as YAML yet.
    """

    key: str
    value: Any
    source: Source
    where: str
    is_text: bool = False


def from_file(path: Path, is_section: Callable[[str], bool]) -> Iterator[Given]:
    """Yield the values in a YAML file, key by key; raise SettingsError when it cannot be read."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path} must hold sections such as 'gateway:' with keys below them.")
        yield from _from_mapping(root, "", path, is_section)
    except OSError as error:
        raise SettingsError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"The configuration file {path} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"The configuration file {path} is not valid YAML: {error}.") from None


def _from_mapping(
    node: yaml.MappingNode, prefix: str, path: Path, is_section: Callable[[str], bool]
) -> Iterator[Given]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        where = f"{path}, line {key_node.start_mark.line + 1}"
        if key in seen:
            raise SettingsError(f"'{key}' stands twice ({where}): keep one of them.")
        seen.add(key)
        if is_section(key) and isinstance(value_node, yaml.MappingNode):
            yield from _from_mapping(value_node, f"{key}.", path, is_section)
        elif not (is_section(key) and _is_null(value_node)):
            yield Given(key, _construct(value_node), "file", where)


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _construct(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield a value for every `NATTERJACK_SECTION__KEY` variable."""
    for name, text in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield Given(key, text, "environment", f"environment variable {name}", is_text=True)


def from_overrides(overrides: Iterable[str]) -> Iterator[Given]:
    """Yield a value for every `--set key=value`."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--set {override!r}: write --set key=value, such as --set gateway.port=8080.")
        yield Given(key.strip(), text, "--set", "--set", is_text=True)


def environment_name(key: str) -> str:
    """Return the variable that sets `key`."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
