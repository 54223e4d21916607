"""Coming back to a stream, and sending a request twice."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidParameter
from schemas.openai import ChatCompletionRequest
from services.gateway.frames import EventFrames
from services.gateway.resumption import Place, event_id, place_of, repeatable_id, resumed
from services.gateway.translate import translate_chat
from tests.unit.gateway.test_gateway_frames import ANSWER, chunk, delta, final

CHUNKS = [chunk(delta("a")), chunk(delta("")), chunk(delta("b", finish_reason="stop")), final(3)]


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_the_id_of_an_event_tells_the_place(answer: str, positions: list[int]) -> None:
    answer = answer.encode("utf-8", "ignore").decode() or "x"
    assert place_of(event_id(answer, positions)) == Place(answer, tuple(positions))


@pytest.mark.parametrize("header", ["x", "/1", "a/", "a/b", "a/1,", "a/-1", "a/1/2", "a/" + "9" * 20, "a" * 500 + "/1"])
def test_what_is_no_event_of_ours_is_refused(header: str) -> None:
    with pytest.raises(InvalidParameter):
        place_of(header)


def test_without_the_header_there_is_no_place() -> None:
    assert place_of(None) is None
    assert place_of("") is None


@pytest.mark.parametrize("read", range(5))
def test_a_resumed_stream_goes_on_exactly_where_it_was_left(read: int) -> None:
    def pieces(frames: EventFrames) -> list[bytes]:
        return [*(frames.chunk(0, one) for one in CHUNKS), frames.end()]

    whole, rest = pieces(EventFrames(ANSWER)), pieces(EventFrames(ANSWER, (read,)))
    assert rest == [b""] * read + whole[read:]


def translation(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    return translate_chat(ChatCompletionRequest.model_validate_json(json.dumps(body)), "smol", "id1")


def test_a_resumed_request_asks_for_nothing_new() -> None:
    found = resumed(translation(), Place("id1", (2,)))
    assert (found.read, found.requests[0].resume) == ((2,), True)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"stream": False}, Place("id1", (1,))),
        ({"request_id": "mine"}, Place("id1", (1,))),
        ({}, Place("id1", (1, 2))),
    ],
)
def test_another_request_cannot_be_resumed(fields: dict[str, Any], place: Place) -> None:
    with pytest.raises(InvalidParameter):
        resumed(translation(**fields), place)


def test_a_repeatable_id_is_of_client_key_and_request() -> None:
    given = ("key", "client", "/path", b"body")
    assert repeatable_id(*given) == repeatable_id(*given)
    others = [("k", "client", "/path", b"body"), ("key", "c", "/path", b"body"), ("key", "client", "/p", b"body"),
              ("key", "client", "/path", b"b"), ("keyc", "lient", "/path", b"body")]  # fmt: skip
    assert len({repeatable_id(*other) for other in (given, *others)}) == 6
    for key in ("", "x" * 256):
        with pytest.raises(InvalidParameter):
            repeatable_id(key, "client", "/path", b"body")
