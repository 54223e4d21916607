"""A child process that answers each line of JSON with one, and is started again whenever it is gone.

Owns the process and its pipes; what the lines mean is its users' matter. To be called from one thread at a time.
"""

import json
import logging
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from services.runtime import launcher

log = logging.getLogger(__name__)

Answer = dict[str, Any]


class AnsweringProcess:
    """Runs a script of ours in Python's isolated mode; `environment` None: this process's own."""

    def __init__(self, script: str, environment: Mapping[str, str] | None = None) -> None:
        self._script = script
        self._environment = environment
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Tell whether there is a child to be asked; one that died between two questions is not."""
        if self.child is not None and self.child.poll() is not None:
            self.end()
        return self.child is not None

    def start(self) -> None:
        """Start the child; it has yet to be asked anything."""
        pipe = subprocess.PIPE
        command = launcher.wrap([sys.executable, "-I", self._script])
        self.child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=self._environment
        )

    def ask(self, line: bytes, timeout_s: float) -> Answer | None:
        """Return the answer to one line; None, and no child any more, when it died or did not answer in time."""
        answer = self._exchange(line, timeout_s)
        if answer is None:
            self.end()
        return answer

    def _exchange(self, line: bytes, timeout_s: float) -> Answer | None:
        child = self.child
        if child is None or child.stdin is None or child.stdout is None:
            return None
        try:
            child.stdin.write(line + b"\n")
            child.stdin.flush()
        except OSError:  # it is gone
            return None
        ready, _, _ = select.select([child.stdout], [], [], timeout_s)
        reply = child.stdout.readline() if ready else b""
        answer: Answer | None = json.loads(reply) if reply.endswith(b"\n") else None
        return answer

    def end(self) -> None:
        """Kill the child; harmless without one."""
        child, self.child = self.child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError as error:  # what was not yet written
                log.debug("closing: %s", error)
        child.wait()
