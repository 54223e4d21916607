"""A program is kept running, held to its deadlines, and given up with the cause named."""

import asyncio
import os
import sys

import pytest

from services.supervisor.child import Program
from services.supervisor.events import DeploymentError
from services.supervisor.keeper import Condition, Keeper
from services.supervisor.settings import RestartSettings

QUICK = RestartSettings(initial_s=0.01, max_s=0.02, limit=3, window_s=60)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


class ScriptedProbe:
    """Answers the same condition until told another."""

    def __init__(self, **condition):
        self.set(**condition)

    def set(self, *, is_ready=True, stage="ready", deadline_s=60.0, **rest):
        self.answer = Condition(is_ready, stage, deadline_s, "load_s", **rest)

    async def condition(self, child):
        return self.answer


@pytest.fixture
async def keep(tmp_path):
    """Return a function that keeps a Python program; everything is stopped at the end."""
    running = []

    def keep(code, probe, restarts=QUICK):
        events = []
        argv = (sys.executable, "-I", "-S", "-c", code)
        program = Program("toy-0", argv, dict(os.environ))
        keeper = Keeper(program, probe, restarts, tmp_path, events.append, silence_limit_s=1.0)
        task = asyncio.create_task(keeper.keep())
        running.append((keeper, task))
        return keeper, task, events

    yield keep
    for keeper, task in running:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await keeper.stop(1.0)


async def within(awaitable, timeout_s=10.0):
    return await asyncio.wait_for(awaitable, timeout_s)


def happenings(events):
    return [event.happening for event in events]


async def restarted(events, times):
    async with asyncio.timeout(10):
        while happenings(events).count("restarting") < times:
            await asyncio.sleep(0.01)


async def test_a_program_becomes_ready_and_is_stopped(keep):
    keeper, task, events = keep(SLEEP, ScriptedProbe())
    await within(keeper.ready.wait())
    await keeper.stop(5.0)
    await within(task)
    assert happenings(events) == ["starting", "ready", "stopping", "stopped"]


async def test_progress_within_a_stage_is_told(keep):
    probe = ScriptedProbe(is_ready=False, stage="loading model", progress=0.25, detail="weights")
    _, _, events = keep(SLEEP, probe)
    async with asyncio.timeout(10):
        while not any(event.stage == "loading model" for event in events):
            await asyncio.sleep(0.01)
    assert (events[-1].progress, events[-1].detail) == (0.25, "weights")


async def test_one_that_dies_is_started_again(keep):
    keeper, _, events = keep(SLEEP, ScriptedProbe())
    await within(keeper.ready.wait())
    os.kill(keeper._child.pid, 9)
    await restarted(events, 1)
    await within(keeper.ready.wait())
    cause = next(event.stage for event in events if event.happening == "restarting")
    assert "SIGKILL" in cause


async def test_too_many_restarts_end_the_deployment_with_the_last_words(keep):
    keeper, task, events = keep("import time; time.sleep(0.3); print('alas'); raise SystemExit(5)", ScriptedProbe())
    with pytest.raises(DeploymentError, match=r"toy-0 failed: it ended with exit code 5.*3 times(?s:.*)\| alas"):
        await within(task)
    assert happenings(events).count("restarting") == 3


@pytest.mark.parametrize("status", [1, 2])
async def test_one_that_cannot_start_is_given_up_at_once(keep, status):
    probe = ScriptedProbe(is_ready=False, stage="loading model")
    _, task, events = keep(f"print('no such model'); raise SystemExit({status})", probe)
    with pytest.raises(DeploymentError, match=rf"exit code {status}(?s:.*)\| no such model"):
        await within(task)
    assert "restarting" not in happenings(events)


async def test_one_that_lost_the_bus_while_starting_is_tried_again(keep):
    _, _, events = keep("raise SystemExit(3)", ScriptedProbe(is_ready=False, stage="connecting"))
    await restarted(events, 1)


async def test_a_stage_that_takes_too_long_ends_the_start_and_names_the_cause(keep):
    probe = ScriptedProbe(is_ready=False, stage="loading model", deadline_s=0.3)
    _, task, _ = keep(SLEEP, probe)
    with pytest.raises(DeploymentError, match=r"'loading model' after .*deadlines\.load_s(?s:.*)\| up"):
        await within(task)


async def test_a_new_stage_gets_its_own_time(keep):
    probe = ScriptedProbe(is_ready=False, stage="one", deadline_s=0.5)
    keeper, task, _ = keep(SLEEP, probe)
    await asyncio.sleep(0.35)
    probe.set(is_ready=False, stage="two", deadline_s=0.5)
    await asyncio.sleep(0.35)
    assert not task.done()
    probe.set()
    await within(keeper.ready.wait())


async def test_one_that_falls_silent_is_killed_and_started_again(keep):
    probe = ScriptedProbe()
    keeper, _, events = keep(SLEEP, probe)
    await within(keeper.ready.wait())
    first = keeper._child.pid
    probe.set(silence_s=5.0)
    await restarted(events, 1)
    probe.set()
    await within(keeper.ready.wait())
    assert keeper._child.pid != first
    assert any("silent for 5 s" in event.stage for event in events)


async def test_one_that_only_a_restart_can_help_is_restarted(keep):
    probe = ScriptedProbe()
    keeper, _, events = keep(SLEEP, probe)
    await within(keeper.ready.wait())
    probe.set(fault="its store is broken")
    await restarted(events, 1)
    probe.set()
    await within(keeper.ready.wait())
    assert any(event.stage == "its store is broken" for event in events)


async def test_a_restart_that_takes_too_long_counts_as_a_failure_not_as_the_end(keep):
    probe = ScriptedProbe()
    keeper, task, events = keep(SLEEP, probe)
    await within(keeper.ready.wait())
    probe.set(is_ready=False, stage="loading model", deadline_s=0.1)
    await restarted(events, 2)
    assert not task.done()


async def test_one_that_leaves_in_good_order_is_started_again_however_often(keep):
    keeper, task, events = keep("import time; time.sleep(0.4)", ScriptedProbe())
    await within(keeper.ready.wait())
    await restarted(events, QUICK.limit + 2)
    assert not task.done()
    causes = {event.stage for event in events if event.happening == "restarting"}
    assert causes == {"it has left in good order"}


async def test_one_that_starts_may_be_silent_for_longer(keep):
    probe = ScriptedProbe(is_ready=False, stage="loading model", silence_s=1.5)
    _, _, events = keep(SLEEP, probe)
    await asyncio.sleep(0.4)
    assert "restarting" not in happenings(events)
    probe.set(silence_s=1.5)
    await restarted(events, 1)
