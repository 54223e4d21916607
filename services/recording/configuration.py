"""Two configurations side by side: of a file, of a recording, of a running deployment. Pure.

Each side says for every key which instance has which value, and where that came from. Values come masked; what one side
cannot know (a file has no build, a running service publishes no other's settings) is left out and counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.control import ConfigValue, EffectiveConfig, Registration

BUILD = "build"
EVERYWHERE = ""
"""The instance of a value that all instances share, or that a file gives."""
UNCHANGING = "running"
"""The source of what nobody configured."""


@dataclass(slots=True)
class Configuration:
    """One side: values by key and instance. `is_file`: of what would be started, not of what runs."""

    label: str
    values: dict[str, dict[str, ConfigValue]] = field(default_factory=dict)
    is_file: bool = False

    def add(self, key: str, instance: str, value: ConfigValue) -> None:
        """Note one value."""
        self.values.setdefault(key, {})[instance] = value


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """One key with two values; `instance` is empty where all instances differ alike. None: the side lacks it."""

    key: str
    instance: str
    ours: ConfigValue | None
    other: ConfigValue | None


def of_file(label: str, shown: Mapping[str, ConfigValue]) -> Configuration:
    """Return the configuration that a file, the environment and overrides make.

    An embedded server's address is what the services would be told of it.
    """
    configuration = Configuration(label, is_file=True)
    url, host, port = shown.get("bus.url"), shown.get("bus.host"), shown.get("bus.port")
    if url is not None and url.value is None and host is not None and port is not None:
        shown = {**shown, "bus.url": ConfigValue(value=f"nats://{host.value}:{port.value}", source="default")}
    for key, value in shown.items():
        configuration.add(key, EVERYWHERE, value)
    return configuration


def of_instances(
    label: str, configs: Iterable[EffectiveConfig], registrations: Iterable[Registration]
) -> Configuration:
    """Return what running instances have published: values, builds, and what their engines chose."""
    configuration = Configuration(label)
    for config in configs:
        for key, value in config.values.items():
            configuration.add(key, config.instance, value)
        build = config.build.model_dump(mode="json") if config.build is not None else {}
        for name, fact in {"version": config.version, **build}.items():
            configuration.add(f"{BUILD}.{name}", config.instance, ConfigValue(value=fact, source=UNCHANGING))
    for registration in registrations:
        if registration.capacity is not None:
            for name, fact in registration.capacity.model_dump(mode="json").items():
                value = ConfigValue(value=fact, source=UNCHANGING)
                configuration.add(f"capacity.{name}", registration.instance, value)
    return configuration


def diff(ours: Configuration, other: Configuration) -> list[ConfigDifference]:
    """Return what differs, by key; a value from another source is no difference."""
    differences: list[ConfigDifference] = []
    for key in sorted(ours.values.keys() | other.values.keys()):
        mine, theirs = ours.values.get(key), other.values.get(key)
        is_comparable = not (ours.is_file or other.is_file) or (mine is not None and theirs is not None)
        if is_comparable:
            differences += _collapsed(list(_of_key(key, mine or {}, theirs or {})), mine or {}, theirs or {})
    return differences


def num_incomparable(ours: Configuration, other: Configuration) -> int:
    """Return how many keys only one side can know, because the other is a file or no service's."""
    return len(ours.values.keys() ^ other.values.keys()) if ours.is_file != other.is_file else 0


def _of_key(key: str, ours: Mapping[str, ConfigValue], other: Mapping[str, ConfigValue]) -> Iterable[ConfigDifference]:
    """A file's one value stands against each instance's."""
    if EVERYWHERE in ours and EVERYWHERE not in other:
        ours = dict.fromkeys(other, ours[EVERYWHERE])
    elif EVERYWHERE in other and EVERYWHERE not in ours:
        other = dict.fromkeys(ours, other[EVERYWHERE])
    for instance in sorted(ours.keys() | other.keys()):
        mine, theirs = ours.get(instance), other.get(instance)
        if mine is None or theirs is None or mine.value != theirs.value:
            yield ConfigDifference(key, instance, mine, theirs)


def _collapsed(
    found: list[ConfigDifference], ours: Mapping[str, ConfigValue], other: Mapping[str, ConfigValue]
) -> list[ConfigDifference]:
    """Draw a difference that every instance has in the same way into one."""
    num_instances = len((ours.keys() | other.keys()) - {EVERYWHERE})
    alike = {repr((d.ours and d.ours.value, d.other and d.other.value)) for d in found}
    if len(found) > 1 and len(found) >= num_instances and len(alike) == 1:
        return [ConfigDifference(found[0].key, EVERYWHERE, found[0].ours, found[0].other)]
    return found


def as_json(differences: list[ConfigDifference]) -> list[dict[str, Any]]:
    """Return what `--json` prints."""
    return [
        {
            "key": difference.key,
            "instance": difference.instance or None,
            "a": difference.ours and difference.ours.model_dump(),
            "b": difference.other and difference.other.model_dump(),
        }
        for difference in differences
    ]


def as_text(differences: list[ConfigDifference], ours: Configuration, other: Configuration) -> str:
    """Return the differences for a terminal."""
    lines = [f"A  {ours.label}", f"B  {other.label}"]
    for difference in differences:
        where = f" ({difference.instance})" if difference.instance else ""
        mine, theirs = _shown(difference.ours, difference.other), _shown(difference.other, difference.ours)
        lines += [f"{difference.key}{where}", f"    A  {mine}", f"    B  {theirs}"]
    if (number := num_incomparable(ours, other)) > 0:
        lines.append(f"{number} keys exist on one side only, for a file knows no build and services publish their own.")
    lines.append(f"{len(differences)} differences." if differences else "No differences.")
    return "\n".join(lines)


def _shown(value: ConfigValue | None, against: ConfigValue | None) -> str:
    if value is None:
        return "(absent)"
    source = "" if value.source in ("default", UNCHANGING) else f"  [{value.source}]"
    return f"{_short(value.value, against.value if against is not None else None)}{source}"


def _short(value: Any, against: Any) -> str:
    """Of two lists only what the other one lacks is worth reading."""
    if isinstance(value, list) and isinstance(against, list):
        return f"only here: {', '.join(map(str, sorted(set(map(str, value)) - set(map(str, against))))) or 'nothing'}"
    return "null" if value is None else str(value)
