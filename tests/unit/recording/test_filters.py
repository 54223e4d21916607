"""Filters name kinds and requests; a request's messages are found wherever they are mixed with others'."""

import pytest

from services.recording.filters import FilterError, Filters, parse_filters
from services.recording.request_tracker import MAX_REMEMBERED, RequestTracker
from tests.unit.recording.captured_traffic import inner_path, one_request, refused


def test_filters_are_kinds_and_requests():
    assert parse_filters(["step_plan,error", " request=req-1 "]) == Filters(
        frozenset({"step_plan", "error"}), frozenset({"req-1"})
    )
    assert parse_filters([]) == Filters()
    for text in ("steps", "request=", ""):
        with pytest.raises(FilterError, match="generate_request"):
            parse_filters([text])


def test_every_message_of_a_request_is_found_and_no_other():
    messages = [*one_request(), *inner_path(), *one_request("other", at_s=1005.0)]
    tracker = RequestTracker()
    filters = Filters(requests=frozenset({"req-1"}))
    kept = [message for message in messages if filters.keeps(message, tracker)]
    assert kept == messages[: len(one_request()) + len(inner_path())]


def test_kinds_and_requests_together_narrow():
    tracker = RequestTracker()
    filters = Filters(frozenset({"step_result"}), frozenset({"req-1"}))
    kept = [message.schema for message in inner_path() if filters.keeps(message, tracker)]
    assert kept == ["step_result/1"] * 2


def test_a_refusal_belongs_to_the_request_that_it_answers():
    tracker = RequestTracker()
    asked = one_request()[0]
    assert tracker.requests_of(asked) == ("req-1",)
    assert tracker.requests_of(refused("_INBOX.req-1", 1.0)) == ("req-1",)
    assert tracker.requests_of(refused("_INBOX.unknown", 1.0)) == ()


def test_the_tracker_forgets_what_is_long_past():
    tracker = RequestTracker()
    messages = inner_path()
    tracker.requests_of(messages[0])
    assert tracker.request_at("executor-0", 4, 1) == "req-1"
    for number in range(MAX_REMEMBERED):
        tracker._note("executor-9", {"epoch": 1}, number, "x")
    assert tracker.request_at("executor-0", 4, 1) is None
