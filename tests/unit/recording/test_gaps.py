"""What is missing is counted from the numbers in the messages."""

from dataclasses import replace

from services.recording.capture_file import Captured
from services.recording.gaps import GapCounter
from tests.unit.recording.captured_traffic import one_request


def missing(messages):
    counter = GapCounter()
    for message in messages:
        counter.see(message)
    return counter.num_missing


def plan(step, epoch=1, executor="executor-0"):
    return Captured(0.0, f"nj.v1.exec.{executor}.plan", {"epoch": epoch, "step": step}, schema="step_plan/1")


def test_a_whole_recording_misses_nothing():
    assert missing([*one_request(), *(plan(step) for step in (5, 6, 7)), plan(3, executor="executor-1")]) == {}


def test_steps_are_counted_by_executor_and_epoch():
    assert missing([plan(5), plan(9), plan(10), plan(10)]) == {"step_plan": 3}
    assert missing([plan(5), plan(3, epoch=4)]) == {"step_plan": 2}
    assert missing([plan(5, epoch=4), plan(9, epoch=1)]) == {}


def test_a_lost_chunk_shows_in_the_next_one():
    messages = one_request()
    del messages[-2]
    assert missing(messages) == {"output_chunk": 1}


def test_a_request_that_began_before_the_recording_is_no_gap():
    assert missing(one_request()[-2:]) == {}


def test_bodies_that_are_no_objects_do_no_harm():
    assert missing([replace(message, body="x") for message in [*one_request(), plan(1), plan(5)]]) in (
        {},
        {"output_chunk": 2},
    )
