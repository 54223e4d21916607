"""A service's condition from what it says of itself."""

import time
from types import SimpleNamespace

import pytest

from schemas.control import Registration
from services.supervisor.service_probe import ServiceProbe
from services.supervisor.settings import DeadlineSettings
from services.supervisor.sightings import Sightings

DEADLINES = DeadlineSettings(connect_s=1, load_s=2, warm_up_s=3)


async def condition(pid=7, **said):
    sightings = Sightings()
    if said:
        registration = Registration(
            instance="executor-0", incarnation="i", role="executor", model="m", pid=7, **{"state": "starting", **said}
        )
        sightings.heard(registration, time.monotonic())
    return await ServiceProbe("executor-0", sightings, DEADLINES).condition(SimpleNamespace(pid=pid))


@pytest.mark.parametrize(
    ("stage", "key", "deadline_s"),
    [
        ("connecting", "connect_s", 1),
        ("loading model", "load_s", 2),
        ("warming up", "warm_up_s", 3),
        ("novel", "load_s", 2),
    ],
)
async def test_each_stage_has_its_deadline(stage, key, deadline_s):
    found = await condition(stage=stage, progress=0.5, detail="words")
    assert (found.is_ready, found.deadline_key, found.deadline_s) == (False, key, deadline_s)
    assert (found.stage, found.progress, found.detail) == (stage, 0.5, "words")


async def test_a_ready_service_is_ready():
    assert (await condition(state="ready", stage="ready")).is_ready


@pytest.mark.parametrize("state", ["draining", "failed"])
async def test_one_that_leaves_is_not_ready(state):
    assert not (await condition(state=state)).is_ready


async def test_before_the_first_beat_of_this_life_the_process_is_still_starting():
    for found in (await condition(), await condition(pid=8, state="ready")):
        assert (found.is_ready, found.stage, found.deadline_key) == (False, "starting process", "connect_s")
