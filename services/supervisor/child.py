"""One child process: starts, is waited for, is stopped or killed together with everything that it started.

Knows nothing of services, stages or restarts.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.runtime import launcher
from services.supervisor.child_log import ChildLog

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a name for people and logs, an argument list, an environment and a niceness."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    nice: int = 0


class Child:
    """One life of a program. The launcher sees to it that it never outlives this process."""

    def __init__(self, program: Program, log: ChildLog) -> None:
        self.program = program
        self.log = log
        self.started_s = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process in a session of its own."""
        self.log.forget()
        self.started_s = time.monotonic()
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher.wrap(self.program.argv, nice=self.program.nice),
                env=dict(self.program.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read(read_end), name=f"log of {self.program.name}")

    @property
    def pid(self) -> int:
        """The process's id, 0 before the start; the launcher keeps it when it becomes the program."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Tell whether it has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Return the exit status once it has ended and its output is read; negative for a signal, 0 before a start."""
        if self._process is None or self._reader is None:
            return 0
        status = await self._process.wait()
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), 1.0)
        return status

    async def stop(self, grace_s: float) -> None:
        """Ask it to end by SIGTERM; kill it when it has not ended after `grace_s`."""
        if self._process is None:
            return
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """Kill it at once, with whatever it started; harmless when nothing of it is left."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, read_end: int) -> None:
        """A pipe of our own: with one of asyncio's, `wait` would wait for everybody who holds its other end."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        try:
            while data := await reader.read(READ_BYTES):
                self.log.write(data)
        finally:
            transport.close()
