"""Finds messages that the recorder did not get, by the numbers that messages carry. Pure.

Steps are numbered per executor and epoch, and every chunk names the sequence number of the chunk before it. What has no
number (requests, token batches) is counted only where the recorder itself had to drop it.
"""

from typing import Any

from services.recording.capture_file import Captured
from services.recording.message_kinds import kind_name
from services.runtime.transport import PREVIOUS_SEQUENCE_HEADER, SEQUENCE_HEADER

MAX_OPEN_OUTPUTS = 100_000


class GapCounter:
    """Counts, by schema, the messages that must have existed between those that were seen."""

    def __init__(self) -> None:
        self.num_missing: dict[str, int] = {}
        self._steps: dict[tuple[str, str], tuple[int, int]] = {}
        self._outputs: dict[str, str] = {}

    def see(self, captured: Captured) -> None:
        """Take the next message of a live recording."""
        name = kind_name(captured)
        if name in ("step_plan", "step_result"):
            self._see_step(name, captured)
        elif name == "output_chunk":
            self._see_chunk(captured)

    def _see_step(self, name: str, captured: Captured) -> None:
        step, epoch, key = _integer(captured.body, "step"), _integer(captured.body, "epoch"), (name, captured.subject)
        last_epoch, last_step = self._steps.get(key, (epoch, step - 1))
        if epoch < last_epoch or (epoch == last_epoch and step <= last_step):
            return
        self._count(name, step - 1 - (last_step if epoch == last_epoch else 0))
        self._steps[key] = (epoch, step)

    def _see_chunk(self, captured: Captured) -> None:
        """A subject's sequence numbers are not consecutive, so a gap is known to be at least one message."""
        previous, known = captured.headers.get(PREVIOUS_SEQUENCE_HEADER), self._outputs.get(captured.subject)
        if known is not None and previous != known:
            self._count("output_chunk", 1)
        if captured.body.get("final") if isinstance(captured.body, dict) else False:
            self._outputs.pop(captured.subject, None)
        elif len(self._outputs) < MAX_OPEN_OUTPUTS:
            self._outputs[captured.subject] = captured.headers.get(SEQUENCE_HEADER, "")

    def _count(self, name: str, number: int) -> None:
        if number > 0:
            self.num_missing[name] = self.num_missing.get(name, 0) + number


def _integer(body: Any, key: str) -> int:
    value = body.get(key, 0) if isinstance(body, dict) else 0
    return value if isinstance(value, int) else 0
