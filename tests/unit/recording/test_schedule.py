"""What schedulers decided: order, batches, preemptions and cached tokens, and what two schedules have in common."""

import pytest

from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, StepPlan
from services.cli.replay_run import compare_recordings
from services.recording import report
from services.recording.capture_file import Capture, CaptureError
from services.recording.schedule import Schedule, as_rows, compare_schedules, read_schedule
from services.scheduler import executor_state
from services.scheduler.requests import Sequence
from tests.unit.cli.test_planner_replay import simulate
from tests.unit.recording.captured_traffic import captured, one_request, write


def begin(number: int, name: str, *, index: int = 0, cached: int = 0) -> NewSequence:
    return NewSequence(
        sequence=number,
        request_id=name,
        index=index,
        token_ids=(1, 2, 3, 4),
        prompt_len=4,
        max_len=9,
        num_computed=cached,
        blocks=(number,),
        sampling=SamplingParams(),
    )


def plan(step: int, *runs: tuple[int, int], new: tuple[NewSequence, ...] = (), epoch: int = 1, executor: str = "e"):
    run = tuple(Run(sequence=number, num_tokens=tokens) for number, tokens in runs)
    message = StepPlan(scheduler="s", epoch=epoch, step=step, new=new, run=run)
    return captured(message, f"nj.v1.exec.{executor}.plan", 1000.0 + step)


PLANS = [
    plan(1, (1, 4), new=(begin(1, "a"),)),
    plan(2, (1, 1), (2, 2), new=(begin(2, "b", cached=2),)),
    plan(3, (1, 1), (2, 1), (9, 1)),
    plan(4, (3, 5), new=(begin(3, "a"),)),
    plan(1, (1, 4), new=(begin(1, "b"),), epoch=2),
]


def test_admission_batches_preemptions_and_cached_tokens_are_read():
    schedule = read_schedule(PLANS)
    assert schedule.admitted == ["a", "b"]
    assert schedule.steps["e"][1:3] == [(("a", 0, 1), ("b", 0, 2)), (("a", 0, 1), ("b", 0, 1))]
    assert (dict(schedule.preemptions), schedule.cached["b"]) == ({"a": 1}, 2)
    assert schedule.figures()["steps with prompts and decodes"] == 1
    assert schedule.num_steps == 5
    renamed = read_schedule(PLANS, {"b": "x"})
    assert (renamed.admitted, renamed.steps["e"][0]) == (["x"], (("x", 0, 2),))


def test_a_schedule_equals_itself_and_the_first_different_step_is_shown():
    ours = read_schedule(PLANS)
    assert compare_schedules(ours, read_schedule(PLANS), 0.0).differences == []
    other = read_schedule([*PLANS[:2], plan(3, (1, 1)), *PLANS[3:]])
    differences = compare_schedules(ours, other, 0.0).differences
    (batch,) = [d for d in differences if "batch" in d.what]
    assert (batch.position, batch.expected, batch.found) == (2, ["a[0] × 1", "b[0] × 1"], ["a[0] × 1"])
    assert "first different at step 2" in report.described(batch)[0]
    assert compare_schedules(ours, other, 0.2).differences == []
    shorter = compare_schedules(ours, read_schedule(PLANS[:4]), 0.0).differences
    assert next(d for d in shorter if "batch" in d.what).found == "no step"


def test_a_preemption_and_cached_tokens_are_named_by_request():
    other = read_schedule([*PLANS[:3], plan(4, (3, 5), new=(begin(3, "c"),)), *PLANS[4:]])
    differences = compare_schedules(read_schedule(PLANS), other, 0.0).differences
    assert ("a", 1, 0) in [(d.request_id, d.expected, d.found) for d in differences if "preemptions" in d.what]
    warm = read_schedule([plan(1, (1, 4), new=(begin(1, "a", cached=2),)), *PLANS[1:]])
    named = [d.request_id for d in compare_schedules(read_schedule(PLANS), warm, 0.1).differences]
    assert named == ["", "a"]


def test_the_fewest_requests_that_would_have_to_move_are_counted():
    ours, other = Schedule(admitted=list("abcdef")), Schedule(admitted=list("bcdefa"))
    result = compare_schedules(ours, other, 0.0)
    assert (result.num_moved, result.num_requests) == (1, 6)
    assert (result.differences[0].position, result.differences[0].found) == (0, list("bcdef"))
    assert compare_schedules(ours, other, 0.2).differences == []
    assert "requests out of order" in "\n".join(as_rows(result))


def test_recordings_are_compared_under_the_names_that_their_requests_share(tmp_path):
    ours = write(tmp_path / "a", [*one_request("req-1"), plan(1, (1, 4), new=(begin(1, "req-1"),))])
    other = write(tmp_path / "b", [*one_request("req-9"), plan(1, (1, 4), new=(begin(1, "req-9"),))])
    result = compare_recordings(ours, other, None, schedule=0.0)
    assert result.differences == []
    assert "requests out of order" in report.as_text(result)
    assert report.as_json(result)["schedule"]["num_requests"] == 1
    without = write(tmp_path / "c", one_request("req-1"))
    with pytest.raises(CaptureError, match="no step_plan"):
        compare_recordings(ours, without, None, schedule=0.0)


def test_two_equal_simulations_decide_alike_and_a_wrong_preemption_is_found(tmp_path, monkeypatch):
    schedules = [read_schedule(simulate(tmp_path / name, 3)[0].messages()) for name in ("a", "b")]
    assert compare_schedules(*schedules, 0.0).differences == []
    assert schedules[0].preemptions.total() > 0

    def earliest(running, limits) -> Sequence | None:
        return min(running, key=lambda sequence: sequence.request.work.created_s, default=None)

    monkeypatch.setattr(executor_state, "victim", earliest)
    simulate(tmp_path / "c", 3)
    result = compare_schedules(schedules[0], read_schedule(Capture(tmp_path / "c").messages()), 0.0)
    batch = next(d for d in result.differences if "batch" in d.what)
    assert (batch.position or 0) > 0
    assert batch.expected != batch.found
