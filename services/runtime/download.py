"""Runs a program that downloads into a directory: reports bytes, lets nothing of it survive an interruption.

Knows neither package indexes nor hubs: pypi_source.py and hf_source.py do.
"""

import contextlib
import errno
import os
import selectors
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from services.runtime import launcher

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and in all (None: not known), several times a second; may raise to stop."""

POLL_S = 0.1
KEPT_LINES = 200


class ModelSourceError(Exception):
    """The model file cannot be had; the message says why and what to do."""

    exit_code = 1


def run_download(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    progress: Progress,
    read_progress: Callable[[str], tuple[int | None, int | None]],
) -> tuple[int, str]:
    """Run `argv` until it ends, and return its exit status and the last lines of its output.

    `read_progress` turns an output line into (bytes so far, bytes in all) where it says so; the size of
    what lies in `directory` stands in for the bytes so far. The program is killed when `progress` raises.
    """
    done: int | None = None
    total: int | None = None
    kept: list[str] = []
    with _killed_at_the_end(argv, environment) as process:
        if process.stdout is None:
            raise RuntimeError("the child's output is not a pipe")
        for line in _lines(process.stdout):
            if line is not None:
                said_done, said_total = read_progress(line)
                done, total = said_done or done, said_total or total
                if said_done is None and said_total is None:
                    kept = [*kept[-KEPT_LINES:], line]
            if total is not None:
                check_space(directory, total - size_of(directory))
            progress(size_of(directory) if done is None else done, total)
        status = process.wait()
    return status, "\n".join(kept)


@contextlib.contextmanager
def _killed_at_the_end(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        launcher.wrap(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def _lines(output: IO[bytes]) -> Iterator[str | None]:
    """Yield output lines as they come, and None whenever there was none for a while."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if not selector.select(POLL_S):
                yield None
                continue
            data = os.read(output.fileno(), 65536)
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            if not data:
                lines = [rest]
            for line in lines:
                if line.strip():
                    yield line.decode("utf-8", "replace")
            if not data:
                return


def size_of(directory: Path) -> int:
    """Return the bytes of all files below `directory`; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def check_space(directory: Path, num_bytes: int) -> None:
    """Raise ModelSourceError when the disk of `directory` has less than `num_bytes` left."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise no_space(directory, f"{num_bytes / 1e6:.0f} MB more are needed, {free / 1e6:.0f} MB are free")


def no_space(directory: Path, facts: str = "no space left on device") -> ModelSourceError:
    """Return the error for a full disk."""
    return ModelSourceError(
        f"Not enough disk space for the model in {directory}: {facts}. "
        "Free some, or set model.cache_dir to a directory on another disk."
    )


def file_error(error: OSError, directory: Path) -> ModelSourceError:
    """Return the error for a file operation that failed in `directory`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return no_space(directory)
    return ModelSourceError(
        f"Cannot write the model to {directory}: {error.strerror}. Set model.cache_dir to a writable directory."
    )
