"""The settings every service shares, and everything that is read from the process's environment.

Each service has one frozen settings model, read once in its `__main__` and passed down. settings_loading.py
puts it together from file, environment and `--set`. This is the only module that reads `os.environ`.
"""

import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from services.runtime.setting_sources import SettingsError, Source, environment_name
from services.runtime.settings_loading import Loaded, S, Section, known_keys, load, masked
from services.runtime.shared_settings import (
    BUILTIN_BYTES,
    DEFAULT_SOURCE,
    BusSettings,
    CommonSettings,
    ModelSettings,
    Port,
    Seconds,
    TelemetrySettings,
)

__all__ = [
    "BUILTIN_BYTES",
    "DEFAULT_SOURCE",
    "BusSettings",
    "CommonSettings",
    "Loaded",
    "ModelSettings",
    "Port",
    "Seconds",
    "Section",
    "SettingsError",
    "Source",
    "TelemetrySettings",
    "cache_dir",
    "child_environment",
    "known_keys",
    "load_settings",
    "masked",
    "state_dir",
]


def load_settings(
    kind: type[S],
    *,
    file: Path | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded[S]:
    """Return the settings of `kind` with their sources; raise SettingsError that names every problem.

    `overrides` are `key=value` texts. `environ` is the process's environment unless given. Sections of other
    roles are skipped when `kind` does not have them.
    """
    return load(kind, file=file, overrides=overrides, environ=os.environ if environ is None else environ)


def cache_dir() -> Path:
    """Return where downloads are kept: `$XDG_CACHE_HOME/natterjack`, by default below `~/.cache`."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Return where deployments keep streams and logs: `$XDG_STATE_HOME/natterjack`, or ~/.local/state's."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def _xdg(variable: str, default: str) -> Path:
    """XDG base directory specification: a relative path in the variable is to be ignored."""
    chosen = Path(os.environ.get(variable, ""))
    return (chosen if chosen.is_absolute() else Path.home() / default) / "natterjack"


def child_environment(values: Mapping[str, str] = {}, variables: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment for a child process: ours, plus settings by dotted key, plus plain variables.

    Where this package runs from a source tree, `PYTHONPATH` leads a child Python to the same one.
    """
    environment = {**os.environ, **{environment_name(key): text for key, text in values.items()}, **variables}
    root = Path(__file__).resolve().parents[2]
    if root not in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environment
