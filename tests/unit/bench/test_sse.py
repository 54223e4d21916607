"""Events come out whole, wherever the network cut the bytes."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.sse import EventReader, EventStreamError

STREAM = (
    b': keep-alive\n\nid: a/1\ndata: {"n": 1}\n\ndata: {"n": 2, "text": "\xc3\xa4"}\r\n\r\n'
    b'event: x\n\ndata:{"n": 3}\n\ndata: [DONE]\n\ndata: {"n": 4}\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events_up_to_done(cuts):
    reader, places = EventReader(), [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    events = [event for part in parts for event in reader.feed(part)]
    assert [event["n"] for event in events] == [1, 2, 3]
    assert reader.is_done


def test_an_event_that_is_no_json_is_an_error():
    with pytest.raises(EventStreamError, match="no JSON"):
        list(EventReader().feed(b"data: {oops\n\n"))


def test_what_is_json_but_no_object_is_skipped():
    assert list(EventReader().feed(b"data: 5\n\ndata: " + orjson.dumps({"n": 1}) + b"\n\n")) == [{"n": 1}]
