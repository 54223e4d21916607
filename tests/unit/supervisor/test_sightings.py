"""Whether a silence is one instance's or the whole bus's."""

from schemas.control import Registration
from services.supervisor.sightings import QUIET_S, Sightings


def beat(instance="executor-0", pid=7):
    return Registration(instance=instance, incarnation="i", role="executor", model="m", state="ready", pid=pid)


def test_an_instance_that_others_outlive_is_silent():
    sightings = Sightings()
    sightings.heard(beat("a"), 0.0)
    for second in range(20):
        sightings.heard(beat("b"), float(second))
    assert sightings.silence_s("a", 19.5) == 19.5
    assert sightings.silence_s("b", 19.5) == 0.5


def test_when_nobody_is_heard_nobody_is_silent():
    sightings = Sightings()
    sightings.heard(beat("a"), 0.0)
    sightings.heard(beat("b"), 0.0)
    assert sightings.silence_s("a", 60.0) == 0.0


def test_after_a_silence_of_the_bus_everybody_gets_time_to_come_back():
    sightings = Sightings()
    sightings.heard(beat("a"), 0.0)
    sightings.heard(beat("b"), 60.0)
    assert sightings.silence_s("a", 61.0) == 1.0
    for second in range(61, 71):
        sightings.heard(beat("b"), float(second))
    assert sightings.silence_s("a", 70.0) == 10.0


def test_one_that_was_never_heard_is_not_silent():
    sightings = Sightings()
    sightings.heard(beat("b"), 0.0)
    assert sightings.silence_s("a", QUIET_S / 2) == 0.0


def test_the_beat_of_an_earlier_life_says_nothing_of_this_one():
    sightings = Sightings()
    sightings.heard(beat(pid=7), 0.0)
    assert sightings.of("executor-0", 7) is not None
    assert sightings.of("executor-0", 8) is None
    assert sightings.of("tokenizer-0", 7) is None
