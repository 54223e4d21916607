"""One fault under load, and what became of every stream."""

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.runtime.bus import Bus
from tests.faults.deployment import Deployment
from tests.faults.faults import FAULTS

MIN_BEFORE_S = 0.2
BEFORE_RANGE_S = 0.8


class ClientStream(Protocol):
    """One request of a client."""

    problem: str
    longest_silence_s: float

    async def run(self, bus: Bus) -> None:
        """Send it and read to its end."""


@dataclass
class Trial:
    """A fault's name and target, and the streams that ran meanwhile."""

    fault: str
    target: str
    duration_s: float = 0.0
    streams: Sequence[ClientStream] = ()
    left: dict[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What any stream said wrongly, and what was left behind."""
        left = [f"left behind: {self.left}"] if self.left else []
        return [stream.problem for stream in self.streams if stream.problem] + left

    def row(self) -> str:
        """One line of the table."""
        return _row(self.fault, self.target, self.duration_s, self.streams)


HEADINGS = f"{'fault':<10} {'target':<16} {'s':>5} {'streams':>8} {'wrong':>6} {'hung':>5} {'p50 s':>8} {'max s':>8}"


async def run_trial(
    deployment: Deployment, trial: Trial, streams: Sequence[ClientStream], *, randomness: random.Random
) -> Trial:
    """Run the streams and let the fault happen at a random moment of theirs."""
    trial.streams = streams
    await deployment.wait_whole()
    tasks = [asyncio.create_task(stream.run(deployment.bus)) for stream in streams]
    await asyncio.sleep(MIN_BEFORE_S + BEFORE_RANGE_S * randomness.random())
    await FAULTS[trial.fault](deployment, trial.target, trial.duration_s)
    await asyncio.gather(*tasks)
    await deployment.wait_whole()
    trial.left = await deployment.wait_idle()
    return trial


def table(trials: Iterable[Trial]) -> str:
    """Return the table of counts, and of the longest silence of a stream as a measure of the recovery."""
    return "\n".join([HEADINGS, *(trial.row() for trial in trials)])


def summary(trials: Iterable[Trial]) -> str:
    """Return one line for all trials of a fault on a role."""
    groups: dict[tuple[str, str, float], list[ClientStream]] = {}
    for trial in trials:
        role = trial.target.rpartition("-")[0] or trial.target
        groups.setdefault((trial.fault, role, trial.duration_s), []).extend(trial.streams)
    return "\n".join(_row(*key, streams) for key, streams in groups.items())


def _row(fault: str, target: str, duration_s: float, streams: Sequence[ClientStream]) -> str:
    silences = sorted(stream.longest_silence_s for stream in streams)
    wrong = sum(bool(stream.problem) for stream in streams)
    hung = sum("hung" in stream.problem for stream in streams)
    return (
        f"{fault:<10} {target:<16} {duration_s:>5.0f} {len(streams):>8} {wrong:>6} {hung:>5} "
        f"{statistics.median(silences):>8.2f} {silences[-1]:>8.2f}"
    )
