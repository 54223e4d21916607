"""From the bus to the lines of a recording."""

from schemas.generation import Accepted, GenerateRequest
from services.recording.arrivals import MAX_HELD_REPLIES, Replies, captured_of
from services.recording.capture_file import Captured
from services.recording.message_kinds import error_of, message_of
from services.runtime.transport import RawMessage
from tests.unit.recording.captured_traffic import one_request, refused


def test_only_known_headers_are_kept_for_others_may_repeat_a_text():
    raw = RawMessage(
        "nj.v1.live.r",
        {"Nj-Schema": "output_chunk/1", "traceparent": "t", "Nats-Sequence": "4", "X": "secret"},
        b'{"final": true}',
        "_INBOX.1",
    )
    assert captured_of(1.5, raw) == Captured(
        1.5, "nj.v1.live.r", {"final": True}, "output_chunk/1", "t", "_INBOX.1", headers={"Nats-Sequence": "4"}
    )


def test_errors_and_messages_by_hand_get_their_kind():
    error = captured_of(1.0, RawMessage("_INBOX.1", {"Nats-Service-Error": "no"}, b"{}"))
    assert error.schema == "error"
    assert captured_of(1.0, RawMessage("nj.v1.generate.smol", {}, b"{}")).schema == "generate_request/1"
    assert captured_of(1.0, RawMessage("x", {}, b"{}")).schema is None
    assert captured_of(1.0, RawMessage("nj.v1.generate.smol", {}, b"\xffno json")).body == "\ufffdno json"
    assert captured_of(1.0, RawMessage("$KV.nj_registry.x", {"KV-Operation": "DEL"}, b"")) is None


def sorted_out(*steps):
    replies = Replies()
    return [ready for captured, is_reply in steps for ready in replies.sort(captured, is_reply=is_reply)]


def test_a_reply_is_put_beside_its_request_whichever_comes_first():
    asked, _, accepted, *_ = one_request()
    for order in ([(asked, False), (accepted, True)], [(accepted, True), (asked, False)]):
        first, second = sorted_out(*order)
        assert first == asked
        assert (second.subject, second.answers) == (accepted.subject, "nj.v1.generate.smol")


def test_replies_to_other_deployments_are_left_out():
    accepted = one_request()[2]
    assert sorted_out((accepted, True)) == []
    many = [(Captured(1.0, f"_INBOX.{number}", {}), True) for number in range(MAX_HELD_REPLIES)]
    asked = one_request()[0]
    assert sorted_out((accepted, True), *many, (asked, False)) == [asked]


def test_a_message_is_read_as_what_it_says_to_be():
    asked, _, accepted, *_ = one_request()
    assert message_of(asked, GenerateRequest).prompt == "Hi"
    assert message_of(asked, Accepted) is None
    assert message_of(Captured(1.0, "s", {}, schema="accepted/9"), Accepted) is None
    assert message_of(Captured(1.0, "s", {"x": 1}, schema="accepted/1"), Accepted) is None
    assert error_of(accepted) is None
    assert error_of(refused("x", 1.0)).code == "invalid_parameter"
    assert error_of(Captured(1.0, "x", {}, schema="error")) is None
