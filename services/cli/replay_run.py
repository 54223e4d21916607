"""A replay from file to comparison: reads the recording, asks a deployment, compares."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from schemas.control import Registration
from services.cli.path import PathToModel
from services.recording.capture_file import Capture, CaptureError, Note
from services.recording.comparison import Comparison, Rules, compare
from services.recording.engines import are_same, engines_of, recorded_engines
from services.recording.outcomes import OutcomeReader, read_outcomes
from services.recording.pairing import REPLAYED, pair, replayed_ids
from services.recording.replay_plan import Reasked, ReplayPlan, plan_replay
from services.recording.replaying import Replay
from services.recording.schedule import ScheduleComparison, compare_schedules, read_schedule
from services.recording.session import Session, Wish, recording
from services.runtime.bus import Bus


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests are sent (`speed` None: as fast as possible), how many at a time, how long one may take."""

    speed: float | None
    max_concurrent: int
    limit_s: float


def rules_of(*captures: Capture, latency: float | None, engines: frozenset[str] = frozenset()) -> Rules:
    """Return what can be compared, given what the recordings hide, and which engines made them.

    `engines` are those of a deployment that one recording is replayed against.
    """
    redactions = {capture.header.redaction for capture in captures}
    ours = recorded_engines(captures[0])
    others = recorded_engines(captures[1]) if len(captures) > 1 else engines
    return Rules(
        text=redactions == {"none"},
        tokens="ids" not in redactions,
        latency=latency,
        is_same_engine=are_same(ours, others),
    )


async def replay_and_compare(
    file: Path, path: PathToModel, pace: Pace, *, output: Path | None, model: str | None, latency: float | None
) -> Comparison:
    """Replay a recording against a deployment; with `output`, that is recorded as well. Raises CaptureError."""
    capture = Capture(file)
    outcomes = read_outcomes(capture.messages())
    plan = plan_replay(outcomes, capture.header.redaction, uuid.uuid4().hex[:8], model)
    if not plan.requests:
        return compare(outcomes, {}, rules_of(capture, latency=latency), plan.skipped)
    async with path.open() as bus:
        entries = await bus.kv_entries(bus.subjects.registry, Registration)
        rules = rules_of(capture, latency=latency, engines=engines_of(entry.message for entry in entries))
        replay = Replay(bus, speed=pace.speed, max_concurrent=pace.max_concurrent, limit_s=pace.limit_s)
        if output is None:
            await replay.run(plan.requests)
        else:
            await _run_recorded(bus, replay, plan, Wish(output, label=f"replay of {file.name}"))
    return compare(outcomes, replay.outcomes, rules, plan.skipped)


async def _run_recorded(bus: Bus, replay: Replay, plan: ReplayPlan, wish: Wish) -> None:
    async with recording(bus, wish) as session:
        await replay.run(plan.requests, lambda asked: _note(session, asked))


def _note(session: Session, asked: Reasked) -> None:
    session.recorder.note(REPLAYED, {"original": asked.original, "request_id": asked.request_id})


def compare_recordings(expected: Path, found: Path, latency: float | None, schedule: float | None = None) -> Comparison:
    """Compare the outcomes of two recordings, and what their schedulers decided, within the tolerance `schedule`.

    Raises CaptureError.
    """
    ours, other = Capture(expected), Capture(found)
    notes: list[Note] = []
    reader = OutcomeReader()
    for line in other:
        if isinstance(line, Note):
            notes.append(line)
        else:
            reader.see(line)
    outcomes = read_outcomes(ours.messages())
    paired = pair(outcomes, reader.in_order(), replayed_ids(notes))
    result = compare(outcomes, paired, rules_of(ours, other, latency=latency))
    if schedule is not None:
        names = {outcome.request_id: name for name, outcome in paired.items()}
        result.schedule = _compare_schedules(ours, other, names, schedule)
        result.differences += result.schedule.differences
    return result


def _compare_schedules(ours: Capture, other: Capture, names: dict[str, str], tolerance: float) -> ScheduleComparison:
    """Compare the plans of the requests that both recordings hold; raises CaptureError where one has none."""
    sides = (
        read_schedule(ours.messages(), {name: name for name in names.values()}),
        read_schedule(other.messages(), names),
    )
    for capture, side in zip((ours, other), sides, strict=True):
        if not side.steps:
            raise CaptureError(f"{capture.path} holds no step_plan of these requests: record without --filter.")
    return compare_schedules(*sides, tolerance)
