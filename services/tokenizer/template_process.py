"""A chat template in a process of its own (`template_worker.py`), which is started again whenever it is gone.

Knows nothing of conversations. To be called from threads: a rendering takes a fraction of a millisecond, and a second
at most.
"""

import json
import logging
import threading
from typing import Any

from schemas.errors import InvalidParameter, Unavailable
from services.tokenizer import template_worker
from services.tokenizer.answering_process import AnsweringProcess

log = logging.getLogger(__name__)

MAX_CPU_S = 1.0
"""Of one rendering. A conversation that fills a context of 100,000 tokens takes a few hundredths."""
START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 10.0
"""Far more than its CPU time: on a busy machine it may wait for a core."""
MAX_REASON_CHARS = 500


def refused(reason: str) -> InvalidParameter:
    """Return the error of a conversation that a template does not take."""
    return InvalidParameter(
        f"The model's chat template refuses this conversation: {reason[:MAX_REASON_CHARS]}.", param="messages"
    )


class TemplateProcess:
    """Renders one template, one conversation at a time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process = AnsweringProcess(template_worker.__file__, environment={})

    def start(self) -> None:
        """Compile the template; raises ValueError for wrong syntax, Unavailable when the process does not start."""
        with self._lock:
            self._start()

    def render(self, values: dict[str, Any]) -> str:
        """Return the text; raises InvalidParameter when the template refuses, or needs more than it may have."""
        if not self._lock.acquire(timeout=ANSWER_TIMEOUT_S):
            raise Unavailable("Another conversation keeps the chat template busy; try again.")
        try:
            return self._render(values)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._process.end()

    def _render(self, values: dict[str, Any]) -> str:
        try:
            line = json.dumps(values).encode()
        except (ValueError, RecursionError):
            raise refused("it is nested too deeply, or has a number of too many digits") from None
        if not self._process.is_running:
            self._start()
        answer = self._process.ask(line, ANSWER_TIMEOUT_S)
        if answer is None:
            log.warning("a conversation was too much for the chat template; its process was ended")
            raise refused("it takes more time or memory than a template may have")
        if "error" in answer:
            raise refused(answer["error"])
        text: str = answer["text"]
        return text

    def _start(self) -> None:
        self._process.start()
        template = json.dumps({"source": self._source, "max_cpu_s": MAX_CPU_S}).encode()
        answer = self._process.ask(template, START_TIMEOUT_S)
        if answer is None:
            raise Unavailable("The chat template cannot be rendered: its process did not start, or did not compile it.")
        if "error" in answer:
            self._process.end()
            raise ValueError(f"the chat template has an error: {answer['error'][:MAX_REASON_CHARS]}")
