"""What is sent again: the same questions with new ids and the seeds that were drawn."""

import pytest

from schemas.control import Cancel
from services.recording.capture_file import Captured
from services.recording.outcomes import read_outcomes
from services.recording.redaction import redact
from services.recording.replay_plan import due_s, plan_replay
from tests.unit.recording.captured_traffic import captured, one_request, refused


def planned(messages, redaction="none", **options):
    return plan_replay(read_outcomes(messages), redaction, "x", **options)


def test_ids_are_new_and_everything_else_is_as_it_was():
    plan = planned([*one_request(stop=("END",), n=2), *one_request("late", at_s=1002.5)])
    first, late = plan.requests
    assert (first.original, first.request_id, first.at_s) == ("req-1", "replay-x-1", 0.0)
    assert (late.original, late.request_id, late.at_s) == ("late", "replay-x-2", 2.5)
    request = first.request
    assert (request.prompt, request.stop, request.n, request.max_tokens) == ("Hi", ("END",), 2, 8)
    assert (request.request_id, request.deliver, request.seed) == ("replay-x-1", "log", 7)


@pytest.mark.parametrize(("drawn", "sent"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_a_request_without_a_seed_gets_the_one_that_was_drawn(drawn, sent):
    (asked,) = planned(one_request(seed=None, drawn_seed=drawn)).requests
    assert asked.request.seed == sent
    assert sent % 2**64 == drawn


def test_a_cancelled_request_is_cancelled_again_after_as_many_tokens():
    messages = one_request()
    cancel = captured(Cancel(request_id="req-1"), "nj.v1.cancel.req-1", 1000.25)
    (asked,) = planned([*messages[:5], cancel, *messages[5:]]).requests
    assert (asked.cancel_at, round(asked.cancel_after_s, 6)) == (2, 0.25)


def test_what_is_not_allowed_is_sent_as_it_was():
    asked = one_request()[0]
    asked.body["temperature"] = 9
    (wrong,) = planned([asked, refused(asked.reply, 1000.1)]).requests
    assert wrong.request is None
    assert (wrong.body["temperature"], wrong.model) == (9, "smol")
    text = Captured(1000.0, "nj.v1.generate.smol", "not json", schema="generate_request/1", reply="_INBOX.t")
    (wrong,) = planned([text, refused("_INBOX.t", 1000.1)]).requests
    assert (wrong.request, wrong.body, wrong.model) == (None, "not json", "smol")


def test_another_model_may_be_asked():
    (asked,) = planned(one_request(), model="other").requests
    assert (asked.request.model, asked.model) == ("other", "other")


def test_what_cannot_be_replayed_says_why():
    whole = one_request()
    plan = planned([*whole[:4], *one_request("b")[3:]])
    assert plan.requests == []
    assert plan.skipped == {
        "req-1": "the recording does not hold its end",
        "b": "the recording does not hold the request itself",
    }


def redacted(messages, kind):
    return [Captured(m.arrived_s, m.subject, redact(m.schema, m.body, kind), m.schema, reply=m.reply) for m in messages]


def test_redacted_text_is_asked_by_its_tokens():
    (asked,) = planned(redacted(one_request(), "text"), "text").requests
    assert asked.request.prompt == (72, 105)
    assert asked.request.messages is None


def test_what_redaction_took_is_not_replayed():
    messages = redacted(one_request(stop=("END",)), "text")
    assert planned(messages, "text").skipped == {"req-1": "its stop strings were redacted"}
    assert planned(redacted(one_request(), "ids"), "ids").skipped == {"req-1": "its content was redacted"}
    asked = redacted(one_request()[:1], "text")[0]
    assert planned([asked, refused("_INBOX.req-1", 1000.1)], "text").skipped == {"req-1": "its content was redacted"}


def test_speed_divides_the_spacing():
    requests = planned([*one_request(), *one_request("late", at_s=1002.5)]).requests
    assert [at_s for at_s, _ in due_s(requests, 1.0)] == [0.0, 2.5]
    assert [at_s for at_s, _ in due_s(requests, 5.0)] == [0.0, 0.5]
    assert [at_s for at_s, _ in due_s(requests, None)] == [0.0, 0.0]
