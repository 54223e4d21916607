"""Outcomes are read from the two ends of the path."""

from schemas.control import Cancel
from schemas.errors import Cancelled
from schemas.output import ChoiceDelta, OutputChunk
from services.recording.latency import measure, percentiles
from services.recording.outcomes import ChoiceOutcome, Outcome, read_outcomes
from tests.unit.recording.captured_traffic import captured, one_request, refused


def test_a_request_is_put_together():
    (outcome,) = read_outcomes(one_request(n=2))
    assert (outcome.asked["prompt"], outcome.asked_s, outcome.is_final) == ("Hi", 1000.0, True)
    assert outcome.work.sampling.seed == 7
    assert outcome.accepted.num_prompt_tokens == 2
    for choice in outcome.choices.values():
        assert (choice.token_ids, choice.text, choice.finish_reason) == ([11, 12, 13], "abc", "length")
    assert outcome.num_tokens == 6


def test_requests_come_in_the_order_in_which_they_were_asked_and_once():
    late, early = one_request("late", at_s=1010.0), one_request("early")
    again = one_request("early", at_s=1001.0)[0]
    outcomes = read_outcomes([*late, *early[:1], again, *early[1:]])
    assert [(outcome.request_id, outcome.asked_s) for outcome in outcomes] == [("early", 1000.0), ("late", 1010.0)]


def test_a_refused_request_has_its_error():
    (outcome,) = read_outcomes([one_request()[0], refused("_INBOX.req-1", 1000.5)])
    assert outcome.is_refused
    assert outcome.is_final
    assert (outcome.error.code, outcome.error.param) == ("invalid_parameter", "temperature")


def test_a_request_without_an_id_is_known_by_its_inbox():
    messages = one_request()
    del messages[0].body["request_id"]
    (outcome,) = read_outcomes(messages)
    assert (outcome.request_id, outcome.asked["prompt"]) == ("req-1", "Hi")
    asked = messages[0]
    (outcome,) = read_outcomes([asked, refused(asked.reply, 1000.5)])
    assert (outcome.request_id, outcome.is_refused) == ("unnamed-1", True)


def test_replies_to_nobody_and_errors_between_services_are_left_alone():
    assert read_outcomes([refused("_INBOX.x", 1.0), refused("_INBOX.y", 1.0, answers="nj.v1.cache.smol")]) == []


def test_a_cancellation_remembers_how_far_the_output_was():
    messages = one_request()
    cancel = captured(Cancel(request_id="req-1"), "nj.v1.cancel.req-1", 1000.15)
    (outcome,) = read_outcomes([*messages[:4], cancel, cancel, *messages[4:]])
    assert (outcome.cancelled_at, outcome.cancelled_s) == (1, 1000.15)
    (outcome,) = read_outcomes([*messages, cancel])
    assert outcome.cancelled_at is None


def test_a_cancellation_that_was_heard_after_its_end_counts():
    error = Cancelled("cancelled").body()
    end = OutputChunk(request_id="req-1", model="smol", created_s=1.0, epoch=1, final=True, error=error)
    cancel = captured(Cancel(request_id="req-1"), "nj.v1.cancel.req-1", 1000.15)
    (outcome,) = read_outcomes([*one_request()[:4], captured(end, "nj.v1.live.req-1", 1000.14), cancel])
    assert (outcome.cancelled_at, outcome.error.code) == (1, "cancelled")


def test_tokens_that_a_second_writer_repeats_count_once():
    choice = ChoiceOutcome()
    choice.add(ChoiceDelta(start=0, token_ids=(1, 2), text="ab"))
    choice.add(ChoiceDelta(start=1, token_ids=(2, 3), text="c"))
    assert choice.token_ids == [1, 2, 3]


def test_latencies_are_measured_over_finished_requests():
    outcomes = read_outcomes([*one_request(), *one_request("b", at_s=1001.0), one_request("c")[0]])
    measured = measure(outcomes)
    assert measured.num_requests == 2
    rows = measured.rows()
    assert round(rows["first_token_s.p50"], 6) == 0.1
    assert round(rows["between_tokens_s.p99"], 6) == 0.1
    assert round(rows["end_to_end_s.p90"], 6) == 0.3
    assert round(rows["tokens_per_s"], 3) == round(6 / 1.3, 3)


def test_nothing_has_no_latencies():
    assert measure([Outcome("x")]).rows() == {"tokens_per_s": 0.0}
    assert percentiles([]) == ()
    assert percentiles([1.0]) == (1.0, 1.0, 1.0)
