"""Gets the model file before the services start, so that each of them finds it in the cache."""

import asyncio
import threading
import time
from pathlib import Path

from services.runtime.model_source import ModelSourceError, needs_file, resolve
from services.runtime.settings import ModelSettings
from services.supervisor.events import DeploymentError, OnEvent, StageEvent

STOP_WAIT_S = 2.0


class _Stopped(Exception):
    """Raised inside the download to end it."""


async def fetch_model(model: ModelSettings, stall_limit_s: float, on_event: OnEvent) -> None:
    """Return when the model file is in the cache; raise DeploymentError with the cause when it cannot be had.

    Cancelling ends the download. The work is done in a thread that does not keep the process alive.
    """
    if not needs_file(model):
        return
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Path] = loop.create_future()
    download = _Download(model, stall_limit_s, on_event, loop, outcome)
    thread = threading.Thread(target=download.run, name="model download", daemon=True)
    thread.start()
    try:
        path = await outcome
    except ModelSourceError as error:
        on_event(StageEvent("model", "failed", str(error)))
        raise DeploymentError(f"The model is not available: {error}") from None
    finally:
        download.stopping.set()
        thread.join(0.0 if outcome.done() and not outcome.cancelled() else STOP_WAIT_S)
    on_event(StageEvent("model", "ready", detail=str(path)))


class _Download:
    """The thread's side: runs `resolve` and passes progress and outcome to the event loop."""

    def __init__(
        self,
        model: ModelSettings,
        stall_limit_s: float,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Path],
    ) -> None:
        self.stopping = threading.Event()
        self._model = model
        self._stall_limit_s = stall_limit_s
        self._on_event = on_event
        self._loop = loop
        self._outcome = outcome
        self._done = -1
        self._moved_s = self._told_s = time.monotonic()

    def run(self) -> None:
        """Resolve the model source; every way out reaches the outcome."""
        try:
            path = resolve(self._model, self._progress)
        except _Stopped:
            return
        except Exception as error:
            self._finish(error)
        else:
            self._finish(path)

    def _finish(self, result: Path | Exception) -> None:
        if not self.stopping.is_set():
            self._loop.call_soon_threadsafe(self._settle, result)

    def _settle(self, result: Path | Exception) -> None:
        if self._outcome.done():
            return
        if isinstance(result, Exception):
            self._outcome.set_exception(result)
        else:
            self._outcome.set_result(result)

    def _progress(self, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if self.stopping.is_set():
            raise _Stopped
        if done != self._done:
            self._done, self._moved_s = done, now_s
        if now_s - self._moved_s > self._stall_limit_s:
            raise ModelSourceError(
                f"the download of {self._model.source} has not moved for {self._stall_limit_s:g} s "
                f"(supervisor.deadlines.download_stall_s), at {done / 1e6:.1f} MB"
            )
        if now_s - self._told_s > 0.1:
            self._told_s = now_s
            of_total = f" of {total / 1e6:.1f}" if total else ""
            fraction = round(done / total, 2) if total else None
            event = StageEvent("model", "starting", "downloading", fraction, f"{done / 1e6:.1f}{of_total} MB")
            self._loop.call_soon_threadsafe(self._on_event, event)
