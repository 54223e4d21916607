"""Messages and Responses as pure code: a stream tells what the whole answer says, and any body is work or a 400."""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from schemas.anthropic import CountTokensRequest, MessagesRequest
from schemas.errors import InvalidRequest
from schemas.generation import Accepted
from schemas.output import ChoiceDelta, OutputChunk, ToolCallDelta, Usage
from schemas.responses import AskedResponse, ResponsesRequest, StoredResponse
from services.gateway.messages.translate import translate_count, translate_messages
from services.gateway.messages.writing import MessageEvents, MessageFold
from services.gateway.responses.translate import translate_response
from services.gateway.responses.writing import ResponseEvents, ResponseFold
from services.gateway.translate import parse_body
from tests.unit.gateway.test_gateway_messages import named_events

ACCEPTED = Accepted(request_id="r", model="smol", num_prompt_tokens=5, created_s=1.0)
RECORD = StoredResponse(
    request_id="r", model="smol", created_s=1.0, num_prompt_tokens=5, body=AskedResponse(input="Hello")
)
PIECES = st.text(alphabet='ab{}":,1 \n\u2028é😀', max_size=4)
ARGUMENTS = ('{"a": [1, 2], "b": "é😀"}', "")
STEPS = st.lists(
    st.tuples(st.just("text"), PIECES)
    | st.tuples(st.just("call"), st.sampled_from(["add", "sub"]))
    | st.tuples(st.just("arguments"), st.sampled_from(ARGUMENTS)),
    max_size=12,
)


@st.composite
def outputs(draw: Any) -> list[OutputChunk]:
    """An output log: text and calls in pieces, in chunks of one piece or several."""
    deltas, num_calls = [], 0
    for kind, value in draw(STEPS):
        if kind == "text":
            deltas.append(ChoiceDelta(text=value))
        elif kind == "call":
            begun = ToolCallDelta(index=num_calls, id=f"call_{num_calls}", name=value)
            deltas.append(ChoiceDelta(tool_calls=(begun,)))
            num_calls += 1
        elif num_calls and deltas[-1].tool_calls and deltas[-1].tool_calls[0].name:
            cuts = sorted(draw(st.lists(st.integers(0, len(value)), max_size=3)))
            for begin, end in itertools.pairwise([0, *cuts]):
                piece = ToolCallDelta(index=num_calls - 1, arguments=value[begin:end])
                deltas.append(ChoiceDelta(tool_calls=(piece,)))
    deltas.append(ChoiceDelta(finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"]))))
    chunks: list[OutputChunk] = []
    while deltas:
        size = draw(st.integers(1, 3))
        chunks.append(chunk(*deltas[:size]))
        del deltas[:size]
    return [*chunks, chunk(final=True, usage=Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2))]


def chunk(*deltas: ChoiceDelta, **fields: Any) -> OutputChunk:
    return OutputChunk(request_id="r", model="smol", created_s=1.0, epoch=1, choices=deltas, **fields)


def written(events: Any, chunks: list[OutputChunk]) -> str:
    text: bytes = events.begin() + b"".join(events.chunk(0, one) for one in chunks) + events.end()
    return text.decode()


def whole(fold: Any, chunks: list[OutputChunk]) -> dict[str, Any]:
    for one in chunks:
        fold.add(0, one)
    body: dict[str, Any] = json.loads(fold.body())
    return body


def accumulated(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """Put a message together as Anthropic's clients do."""
    message: dict[str, Any] = {}
    for name, data in events:
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append({**data["content_block"], "pieces": ""})
            case "content_block_delta":
                message["content"][data["index"]]["pieces"] += data["delta"].get(
                    "text", data["delta"].get("partial_json")
                )
            case "message_delta":
                message |= {**data["delta"], "usage": data["usage"]}
    for block in message["content"]:
        pieces = block.pop("pieces")
        if block["type"] == "text":
            block["text"] = pieces
        elif pieces.startswith("{"):
            block["input"] = from_json(pieces, allow_partial=True)
    return message


@given(outputs())
def test_the_events_of_a_message_join_to_the_whole_one(chunks: list[OutputChunk]) -> None:
    text = written(MessageEvents(ACCEPTED, "id"), chunks)
    events = named_events(text)
    names = [name for name, _ in events if name != "ping"]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop")
    assert accumulated(events) == whole(MessageFold(ACCEPTED), chunks)


@given(outputs())
def test_the_events_of_a_response_tell_of_the_whole_one(chunks: list[OutputChunk]) -> None:
    events = named_events(written(ResponseEvents(RECORD), chunks))
    final = whole(ResponseFold(RECORD), chunks)
    assert events[-1][1]["response"] == final
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert done == final["output"]
    for place, item in enumerate(final["output"]):
        deltas = "".join(
            data["delta"] for name, data in events if name.endswith(".delta") and data["output_index"] == place
        )
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.parametrize(
    "events", [lambda read: MessageEvents(ACCEPTED, "id", read), lambda read: ResponseEvents(RECORD, read)]
)
@given(chunks=outputs(), data=st.data())
def test_a_resumed_stream_is_the_rest_of_the_whole_one(
    events: Callable[[int], Any], chunks: list[OutputChunk], data: Any
) -> None:
    read = data.draw(st.integers(1, len(chunks)))
    before = events(0)
    known = before.begin() + b"".join(before.chunk(0, one) for one in chunks[:read])
    assert known.decode() + written(events(read), chunks) == written(events(0), chunks)


@given(chunks=outputs(), data=st.data())
def test_a_response_is_read_on_from_any_number(chunks: list[OutputChunk], data: Any) -> None:
    events = named_events(written(ResponseEvents(RECORD), chunks))
    after = data.draw(st.integers(0, len(events) - 1))
    assert named_events(written(ResponseEvents(RECORD, after=after), chunks)) == events[after + 1 :]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "text", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "input"]) | st.text(max_size=3), inner
        )
    ),
    max_leaves=8,
)
MESSAGE_FIELDS = st.sampled_from(sorted(MessagesRequest.model_fields) + ["thinking", "seed", "n", "stop", "prompt"])
RESPONSE_FIELDS = st.sampled_from(
    sorted(ResponsesRequest.model_fields) + ["reasoning", "seed", "n", "prompt", "logprobs"]
)
TURNS: Any = [{"role": "user", "content": "Hello"}]


@given(st.dictionaries(MESSAGE_FIELDS, JSON), st.booleans())
def test_any_message_body_is_translated_or_refused_with_a_coded_error(fields: dict[str, Any], is_plain: bool) -> None:
    fields |= {"messages": TURNS, "max_tokens": 5} if is_plain else {}
    with contextlib.suppress(InvalidRequest):
        body = to_json(fields)
        assert translate_messages(parse_body(MessagesRequest, body), "smol", "r").requests
        assert translate_count(parse_body(CountTokensRequest, body), "smol").messages


@given(st.dictionaries(RESPONSE_FIELDS, JSON), st.booleans())
def test_any_response_body_is_translated_or_refused_with_a_coded_error(fields: dict[str, Any], is_plain: bool) -> None:
    fields |= {"input": "Hello"} if is_plain else {}
    with contextlib.suppress(InvalidRequest):
        translation = translate_response(parse_body(ResponsesRequest, to_json(fields)), (), "smol", "r")
        assert translation.requests[0].messages
