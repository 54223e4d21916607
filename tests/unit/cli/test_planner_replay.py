"""The scheduler's plans come out the same again from what it heard, and a changed planner is caught."""

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.planner_replay import replay_planner
from services.cli.planner_report import as_text
from services.recording.capture_file import Capture, CaptureError, CaptureWriter
from services.scheduler import executor_state
from services.scheduler.planner import plan_step
from tests.unit.cli.recorded_simulation import RecordedSimulation
from tests.unit.recording.captured_traffic import HEADER, inner_path, write


def simulate(
    path, seed, num_actions=1500, *, arrival=0.06, repeats=0.0, num_executors=1, num_blocks=16, depth=2, **options
):
    with CaptureWriter(path, HEADER) as writer:
        simulation = RecordedSimulation(
            seed, writer, num_executors=num_executors, num_blocks=num_blocks, depth=depth, **options
        )
        simulation.repeats = repeats
        for _ in range(num_actions):
            simulation.act(arrival=arrival)
        simulation.finish(100_000)
    return Capture(path), simulation


@pytest.mark.parametrize(("num_executors", "num_blocks", "depth"), [(1, 12, 2), (2, 16, 2), (1, 200, 4), (1, 16, 1)])
def test_every_plan_of_a_simulation_is_made_again(tmp_path, num_executors, num_blocks, depth):
    options = {"num_executors": num_executors, "num_blocks": num_blocks, "depth": depth}
    capture, simulation = simulate(tmp_path / "a.jsonl.zst", depth, **options)
    result = replay_planner(capture)
    assert (result.num_different, result.num_skipped) == (0, 0), as_text(result)
    assert result.num_plans > 300
    assert simulation.num_preempted > 0 or num_blocks == 200


def test_every_copy_of_a_block_is_planned_again(tmp_path):
    capture, simulation = simulate(tmp_path / "a.jsonl.zst", 3, repeats=0.7, num_host_blocks=40)
    result = replay_planner(capture)
    assert (result.num_different, result.num_skipped) == (0, 0), as_text(result)
    assert simulation.num_loaded > 0


@pytest.mark.slow
def test_a_hundred_thousand_plans_are_made_again(tmp_path):
    capture, _ = simulate(tmp_path / "a.jsonl.zst", 1, 400_000, arrival=0.03)
    result = replay_planner(capture)
    assert (result.num_different, result.num_skipped) == (0, 0)
    assert result.num_plans >= 100_000


def test_a_changed_planner_is_caught(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    simulate(path, 1)

    def hasty(running, block_size, limits, max_prompt_tokens):
        return plan_step(running, block_size, limits, max_prompt_tokens)[:2]

    monkeypatch.setattr(executor_state, "plan_step", hasty)
    result = CliRunner().invoke(app, ["replay", str(path), "--stage", "scheduler"])
    assert result.exit_code == 1
    assert "First different: step" in result.stdout
    monkeypatch.undo()
    result = CliRunner().invoke(app, ["replay", str(path), "--stage", "scheduler", "--json"])
    assert (result.exit_code, '"num_different":0' in result.stdout) == (0, True)


def test_a_wrong_preemption_is_caught_with_its_step(tmp_path, monkeypatch):
    capture, simulation = simulate(tmp_path / "a.jsonl.zst", 1)
    assert simulation.num_preempted > 0

    def earliest(running, limits):
        return min(running, key=lambda sequence: sequence.request.work.created_s, default=None)

    monkeypatch.setattr(executor_state, "victim", earliest)
    result = replay_planner(capture)
    first = result.differences[0]
    assert result.num_different > 0
    assert first.replayed is None or first.replayed.drop != first.recorded.drop
    assert f"First different: step {first.recorded.step} of epoch" in as_text(result)


def test_a_recording_without_what_the_planner_heard_cannot_be_used(tmp_path):
    path = write(tmp_path / "a.jsonl.zst", inner_path())
    with pytest.raises(CaptureError, match="needs step_plan"):
        replay_planner(Capture(path))
    assert CliRunner().invoke(app, ["replay", str(path), "--stage", "scheduler"]).exit_code == 2
