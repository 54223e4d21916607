"""Two sets of outcomes: what must be equal, what need not be, and how a difference is shown."""

import base64
import struct
from dataclasses import replace

import orjson
import pytest

from schemas.errors import Cancelled, InvalidParameter, QueueFull
from schemas.output import ChoiceDelta, TokenText, ToolCallDelta, Usage
from services.recording import report
from services.recording.capture_file import Note
from services.recording.comparison import Rules, compare, first_difference
from services.recording.outcomes import Outcome, read_outcomes
from services.recording.pairing import pair, replayed_ids
from tests.unit.recording.captured_traffic import one_request


def outcome(**options) -> Outcome:
    return read_outcomes(one_request(**options))[0]


def compared(expected: Outcome, found: Outcome | None, rules: Rules | None = None):
    outcomes = {expected.request_id: found} if found is not None else {}
    return compare([expected], outcomes, rules or Rules())


def differences(*arguments):
    return [(d.what, d.position, d.expected, d.found) for d in compared(*arguments).differences]


def test_the_same_is_equal():
    result = compared(outcome(n=2), outcome(n=2))
    assert (result.differences, result.num_compared, result.num_tokens) == ([], 1, 6)
    assert "EQUAL: 1 requests with 6 tokens." in report.as_text(result)
    assert report.as_json(result)["equal"] is True


def test_the_first_differing_token_and_character_are_shown():
    found = differences(outcome(), outcome(tokens=(11, 99, 13), text="aXc"))
    assert found == [("tokens", 1, [11, 12, 13], [11, 99, 13]), ("text", 1, "abc", "aXc")]
    text = report.as_text(compared(outcome(), outcome(tokens=(11, 99, 13), text="aXc")))
    assert "req-1, choice 0: tokens, first different at token 1" in text
    assert "expected 'abc'" in text
    assert text.endswith("DIFFERENT: 2 differences in 1 of 1 requests with 3 tokens.")


def test_an_output_that_is_longer_differs_at_the_end_of_the_shorter():
    assert differences(outcome(tokens=(11, 12), text="ab"), outcome())[0][:2] == ("tokens", 2)


def test_finish_reasons_and_stop_reasons_count():
    assert differences(outcome(), outcome(finish_reason="stop")) == [("finish_reason", None, "length", "stop")]
    ours, other = outcome(), outcome()
    other.choices[0].stop_reason = "x"
    assert differences(ours, other) == [("stop_reason", None, None, "x")]


def test_a_missing_choice_request_or_end_is_a_difference():
    assert differences(outcome(n=2), outcome()) == [
        ("choice", None, True, False),
        ("usage.completion_tokens", None, 6, 3),
    ]
    assert differences(outcome(), None) == [("presence", None, "an outcome", "none")]
    assert differences(outcome(), replace(outcome(), is_final=False)) == [("end", None, "finished", "no end")]


def test_usage_counts_and_cached_tokens_need_only_be_possible():
    ours, other = outcome(), outcome()
    other.usage = Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)
    assert differences(ours, other) == []
    other.usage = Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=2)
    assert [item[0] for item in differences(ours, other)] == ["usage.completion_tokens", "usage.cached_tokens"]
    other.usage = None
    assert differences(ours, other) == []


def test_log_probabilities_count_within_a_tolerance():
    ours, other = outcome(), outcome()
    ours.choices[0].logprobs, other.choices[0].logprobs = [-1.0, -2.0], [-1.001, -2.5]
    assert differences(ours, other) == [("logprob", 1, -2.0, -2.5)]
    assert differences(ours, other, Rules(logprob=1.0)) == []


def refusal(error) -> Outcome:
    ended = Outcome("req-1", asked_s=1.0)
    ended.refuse(error.body(), 1.5)
    return ended


def test_errors_are_compared_by_code_and_parameter():
    assert differences(refusal(InvalidParameter("a", param="n")), refusal(InvalidParameter("b", param="n"))) == []
    assert differences(refusal(InvalidParameter("a", param="n")), refusal(InvalidParameter("a", param="stop"))) == [
        ("end", None, "refused: invalid_parameter (n)", "refused: invalid_parameter (stop)")
    ]
    assert differences(outcome(), refusal(QueueFull("full")))[0][0] == "end"


def cut(number: int) -> Outcome:
    ended = outcome(tokens=range(11, 11 + number), text="abc"[:number])
    ended.error, ended.usage, ended.cancelled_at = Cancelled("cancelled").body(), None, number
    ended.choices[0].finish_reason = None
    return ended


def test_a_cancelled_request_may_end_elsewhere_but_must_agree_so_far():
    result = compared(cut(2), outcome())
    assert (result.differences, result.timed) == ([], ["req-1"])
    assert compared(cut(2), cut(1)).differences == []
    assert differences(cut(2), outcome(tokens=(11, 99), text="ab"))[0][:2] == ("tokens", 1)
    assert compared(cut(1), outcome(n=2)).differences == []
    assert "Ended by time or load" in report.as_text(result)


def test_a_request_that_was_not_cancelled_must_not_end_so():
    assert differences(outcome(), cut(2))[0] == ("end", None, "finished", "error: cancelled")


def test_a_recording_without_an_end_cannot_be_compared():
    result = compared(replace(outcome(), is_final=False), outcome())
    assert not result.is_usable
    text = report.as_text(result)
    assert "Not compared: 1 requests, for the recording does not hold its end." in text
    assert text.endswith("Nothing could be compared.")


def test_redacted_text_leaves_the_ids_to_compare():
    ours, other = outcome(text="<3 "), outcome()
    assert differences(ours, other, Rules(text=False)) == []
    assert "token ids were compared and text was not" in report.as_text(compared(ours, other, Rules(text=False)))
    assert differences(ours, outcome(tokens=(1, 2, 3)), Rules(text=False))[0][0] == "tokens"


def test_latencies_are_judged_only_when_asked():
    slow = outcome()
    slow.ended_s, slow.token_times = 1009.0, [(1005.0, 1), (1009.0, 2)]
    assert compared(outcome(), slow).differences == []
    names = {item.what for item in compared(outcome(), slow, Rules(latency=0.1)).differences}
    assert {"latency first_token_s.p50", "latency end_to_end_s.p99", "latency tokens_per_s"} <= names
    assert compared(slow, outcome(), Rules(latency=0.1)).differences == []
    text = report.as_text(compared(outcome(), slow, Rules(latency=0.1)))
    assert "at most 10% worse is right" in text


def test_many_differences_are_counted_not_listed():
    outcomes = [outcome(name=f"r{number}") for number in range(30)]
    found = {f"r{number}": outcome(name=f"r{number}", tokens=(1, 2, 3)) for number in range(30)}
    assert "… and 10 more differences" in report.as_text(compare(outcomes, found, Rules()))


@pytest.mark.parametrize(
    ("ours", "other", "only_common", "position"),
    [("abc", "abc", False, None), ("abc", "abd", True, 2), ("ab", "abc", False, 2), ("ab", "abc", True, None)],
)
def test_first_difference(ours, other, only_common, position):
    assert first_difference(ours, other, only_common) == position


def test_requests_are_paired_by_note_by_id_or_by_question():
    ours = [outcome(name="a"), outcome(name="b", prompt="other"), outcome(name="c", prompt="third")]
    others = [outcome(name="x"), outcome(name="b"), outcome(name="z", prompt="third"), outcome(name="y", prompt="no")]
    notes = [Note(1.0, "replayed", {"original": "a", "request_id": "x"}), Note(1.0, "replayed", {}), Note(1.0, "end")]
    paired = pair(ours, others, replayed_ids(notes))
    assert {key: value.request_id for key, value in paired.items()} == {"a": "x", "b": "b", "c": "z"}


def test_what_another_engine_says_is_told_apart_from_what_every_engine_owes():
    rules = Rules(is_same_engine=False)
    result = compared(outcome(), outcome(tokens=(11, 99), text="aX"), rules)
    assert result.differences == []
    assert {d.what for d in result.unpromised} == {"tokens", "text", "usage.completion_tokens"}
    text = report.as_text(result)
    assert "agree in 0 of 1 requests" in text
    assert "EQUAL where it is promised: 1 requests" in text
    assert report.as_json(result)["unpromised"][0]["position"] == 1
    other = outcome(n=2)
    assert [d.what for d in compared(outcome(), other, rules).differences] == ["choice"]
    refused = outcome()
    refused.error = InvalidParameter("no").body()
    assert [d.what for d in compared(outcome(), refused, rules).differences] == ["end"]
    assert "agree in 1 of 1 requests" in report.as_text(compared(outcome(), outcome(), rules))


def test_tool_calls_and_the_logprobs_of_prompts_count():
    ours, other = outcome(), outcome()
    for side, arguments in ((ours, '{"a":'), (other, '{"b":')):
        call = ToolCallDelta(index=0, id=arguments, name="f", arguments=arguments)
        side.choices[0].add(ChoiceDelta(start=3, tool_calls=(call,)))
        side.choices[0].add(ChoiceDelta(start=3, tool_calls=(ToolCallDelta(index=0, arguments="1}"),)))
    assert [(w, e) for w, _, e, _ in differences(ours, other)] == [
        ("tool_calls", [{"name": "f", "arguments": '{"a":1}'}])
    ]
    assert orjson.dumps(report.as_json(compared(ours, other)))
    ours, other = outcome(), outcome()
    for side, logprob in ((ours, -1.0), (other, -2.0)):
        prompt = (TokenText(token_id=1, token="a", token_bytes=(97,), logprob=None),)
        prompt += (TokenText(token_id=2, token="b", token_bytes=(98,), logprob=logprob),)
        side.choices[0].add(ChoiceDelta(start=3, prompt=prompt))
    assert differences(ours, other) == [("prompt_logprob", 0, -1.0, -2.0)]


def test_embeddings_are_compared_value_by_value():
    ours, other = outcome(), outcome()
    for side, values in ((ours, (0.5, 0.25)), (other, (0.5, 0.125))):
        side.choices[0].embedding = base64.b64encode(struct.pack("<2f", *values)).decode()
    assert differences(ours, ours) == []
    assert differences(ours, other) == [("embedding", 1, [0.5, 0.25], [0.5, 0.125])]
    assert "first different at value 1" in report.as_text(compared(ours, other))
    assert compared(ours, other, Rules(is_same_engine=False)).differences == []
