"""Runs a command's coroutine: signals, broken pipes, errors as a message and an exit code."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Coroutine[Any, Any, int], kill: Callable[[], None] = lambda: None) -> int:
    """Run `main` and return its exit code.

    The first signal cancels it, so that it stops what it started; a second one calls `kill` and ends the
    process at once. The handlers are plain ones, not the event loop's: they work while the loop is blocked.
    """
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # what matters comes as an exception
    try:
        code = asyncio.run(_with_signals(main, kill))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_INTERRUPTED
    except Exception as error:
        if (failure := _failure(error)) is None:
            raise
        print(failure, file=sys.stderr)
        return getattr(error, "exit_code", EXIT_FAILED)
    return code


async def _with_signals(main: Coroutine[Any, Any, int], kill: Callable[[], None]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            loop.call_soon_threadsafe(task.cancel)
            return
        kill()
        os._exit(128 + number)

    previous = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + received[0] if received else EXIT_INTERRUPTED
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _failure(error: Exception) -> str | None:
    """Return what to say about an error that a command expects; None for a bug."""
    from schemas.errors import NatterjackError
    from services.recording.capture_file import CaptureError
    from services.runtime.model_source import ModelSourceError
    from services.supervisor.events import DeploymentError

    if isinstance(error, NatterjackError):
        return f"Error ({error.code}): {error.message}"
    return f"Error: {error}" if isinstance(error, DeploymentError | ModelSourceError | CaptureError) else None


def _drop_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
