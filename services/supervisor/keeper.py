"""Keeps one program running: holds its start to deadlines, notices its end or silence, starts it again.

What tells whether the program is well is a `Probe`; the keeper knows neither NATS nor the registry.
"""

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.supervisor.backoff import Backoff
from services.supervisor.child import Child, Program
from services.supervisor.child_log import ChildLog
from services.supervisor.events import DeploymentError, OnEvent, StageEvent
from services.supervisor.settings import RestartSettings

STARTING_POLL_S = 0.1
READY_POLL_S = 0.25
HOPELESS_STATUSES = frozenset({1, 2, 127})
"""Failed, wrong configuration, not runnable: whoever ends so before being ready would do so again."""
UNREADY_PATIENCE = 4
"""Who starts or stops may be silent for so much longer: importing and loading leave little room for heartbeats."""
NUM_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Condition:
    """How a program is: ready or in which stage of its start, and how long it has been silent.

    `deadline_s` limits the stage; `deadline_key` is the setting it comes from, `silence_key` that of the longest
    silence. `fault`: why only a restart can help.
    """

    is_ready: bool
    stage: str
    deadline_s: float
    deadline_key: str
    progress: float | None = None
    detail: str = ""
    silence_s: float = 0.0
    silence_key: str = "heartbeat_timeout_s"
    fault: str = ""


class Probe(Protocol):
    """Tells a program's condition."""

    async def condition(self, child: Child) -> Condition:
        """Return the condition of this life of the program."""


class Keeper:
    """One program of the deployment, over all its lives."""

    def __init__(
        self,
        program: Program,
        probe: Probe,
        restarts: RestartSettings,
        logs: Path,
        on_event: OnEvent,
        *,
        silence_limit_s: float,
    ) -> None:
        self.program = program
        self.ready = asyncio.Event()
        self._was_ready = False
        self._has_left = False
        self._is_stopping = False
        self._probe = probe
        self._backoff = Backoff(restarts)
        self._restarts = restarts
        self._silence_limit_s = silence_limit_s
        self._log = ChildLog(logs / f"{program.name}.log")
        self._child = Child(program, self._log)
        self._on_event = on_event
        self._last_event: StageEvent | None = None

    async def keep(self) -> None:
        """Run until stopped; raise DeploymentError when the program cannot be kept running."""
        while not self._is_stopping:
            self._tell(StageEvent(self.program.name, "starting", "starting process"))
            self._child = Child(self.program, self._log)
            await self._child.start()
            cause = await self._watch()
            self.ready.clear()
            if self._is_stopping:
                return
            pause_s = self._restarts.initial_s if self._has_left else self._backoff.next_pause_s(time.monotonic())
            if pause_s is None:
                raise self._failure(
                    f"{cause}; it was restarted {self._backoff.num_recent} times within "
                    f"{self._restarts.window_s:g} s (supervisor.restarts.limit)"
                )
            self._tell(StageEvent(self.program.name, "restarting", cause, detail=f"again in {pause_s:.1f} s"))
            await asyncio.sleep(pause_s)

    async def stop(self, grace_s: float) -> None:
        """End the program for good."""
        self._is_stopping = True
        if self._child.is_running:
            self._tell(StageEvent(self.program.name, "stopping"))
        await self._child.stop(grace_s)
        self._log.close()
        self._tell(StageEvent(self.program.name, "stopped"))

    def kill(self) -> None:
        """Kill the program at once."""
        self._is_stopping = True
        self._child.kill()

    async def _watch(self) -> str:
        """Return why this life of the program ended, once nothing of it is left."""
        child = self._child
        stage, since_s = "", time.monotonic()
        ended = asyncio.create_task(child.wait())
        try:
            while True:
                poll_s = READY_POLL_S if self.ready.is_set() else STARTING_POLL_S
                await asyncio.wait({ended}, timeout=poll_s)
                if ended.done():
                    return self._explain_end(ended.result())
                condition = await self._probe.condition(child)
                if condition.stage != stage:
                    stage, since_s = condition.stage, time.monotonic()
                self._note(condition)
                cause = self._fault(condition, time.monotonic() - since_s)
                if cause:
                    child.kill()
                    await ended
                    return cause
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended

    def _note(self, condition: Condition) -> None:
        """Take over a condition, and tell it if it is news."""
        if condition.is_ready:
            self._was_ready = True
            self.ready.set()
            self._tell(StageEvent(self.program.name, "ready", detail=condition.detail))
            return
        self.ready.clear()
        self._tell(StageEvent(self.program.name, "starting", condition.stage, condition.progress, condition.detail))

    def _fault(self, condition: Condition, in_stage_s: float) -> str | None:
        """Return why the program must be killed; raise DeploymentError if its first start takes too long."""
        if condition.fault:
            return condition.fault
        if condition.silence_s > self._silence_limit_s * (1 if condition.is_ready else UNREADY_PATIENCE):
            return f"it was silent for {condition.silence_s:.0f} s (supervisor.{condition.silence_key})"
        if condition.is_ready or in_stage_s <= condition.deadline_s:
            return None
        cause = (
            f"it was still in stage '{condition.stage}' after {in_stage_s:.0f} s "
            f"(supervisor.deadlines.{condition.deadline_key})"
        )
        if self._was_ready:
            return cause
        raise self._failure(cause)

    def _explain_end(self, status: int) -> str:
        """Say why it ended; who was told to leave, and did, has not failed, however often that happens."""
        self._has_left = status == 0 and self._was_ready
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(-status).name}"
        if self._has_left:
            return "it has left in good order"
        cause = f"it ended with exit code {status}"
        if status in HOPELESS_STATUSES and not self._was_ready and not self._is_stopping:
            raise self._failure(cause)
        return cause

    def _failure(self, cause: str) -> DeploymentError:
        self._tell(StageEvent(self.program.name, "failed", cause))
        tail = "".join(f"\n  | {line}" for line in self._log.tail(NUM_TAIL_LINES))
        return DeploymentError(
            f"{self.program.name} failed: {cause}. "
            + (f"The last lines of its log ({self._log.path}):{tail}" if tail else "It printed nothing.")
        )

    def _tell(self, event: StageEvent) -> None:
        """Pass news on; progress counts as news by whole percents."""
        if event.progress is not None:
            event = replace(event, progress=round(event.progress, 2))
        if event != self._last_event:
            self._last_event = event
            self._on_event(event)
