"""Output chunks become server-sent events or one whole answer, and both say the same."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InternalError
from schemas.openai import ChatCompletion, ChatCompletionChunk, Completion
from schemas.output import ChoiceDelta, OutputChunk, TokenText, Usage
from services.gateway.answer import Answer
from services.gateway.fold import Fold
from services.gateway.frames import EventFrames
from services.gateway.shapes import CHAT, COMPLETION
from tests.scripted_tokenizer import token_text

ANSWER = Answer(shape=CHAT, id="id1", created=17, model="smol", num_choices=1, num_prompt_tokens=(5,))


def chunk(*choices: ChoiceDelta, **fields: Any) -> OutputChunk:
    return OutputChunk(request_id="id1", model="smol", created_s=17.5, epoch=1, choices=choices, **fields)


def delta(text: str, index: int = 0, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(index=index, text=text, **{"token_ids": (1,), **fields})


def final(completion_tokens: int) -> OutputChunk:
    return chunk(final=True, usage=Usage(prompt_tokens=5, completion_tokens=completion_tokens, cached_tokens=2))


def stream(answer: Answer, *chunks: OutputChunk) -> list[Any]:
    frames = EventFrames(answer)
    text = (b"".join(frames.chunk(0, one) for one in chunks) + frames.end()).decode()
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(entry) for entry in data]


def whole(answer: Answer, *chunks: OutputChunk) -> Any:
    fold = Fold(answer)
    for one in chunks:
        fold.add(0, one)
    return json.loads(fold.body())


def test_a_chat_stream_has_the_role_first_and_the_finish_reason_last() -> None:
    objects = stream(ANSWER, chunk(delta("a")), chunk(delta("b", finish_reason="stop", stop_reason="x")), final(2))
    for one in objects:
        ChatCompletionChunk.model_validate(one)
        assert (one["id"], one["created"], one["model"]) == ("chatcmpl-id1", 17, "smol")
    choices = [one["choices"][0] for one in objects]
    assert [c["delta"] for c in choices] == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
    assert choices[-1]["stop_reason"] == "x"
    assert all("usage" not in one for one in objects)


def test_a_completion_stream_has_text_only() -> None:
    objects = stream(replace(ANSWER, shape=COMPLETION), chunk(delta("a")), chunk(delta("", finish_reason="length")))
    assert all(Completion.model_validate(one).id == "cmpl-id1" for one in objects)
    assert [one["choices"][0]["text"] for one in objects] == ["a", ""]
    assert [one["choices"][0]["finish_reason"] for one in objects] == [None, "length"]


def test_every_choice_has_a_role_and_a_finish_of_its_own_and_each_event_one_choice() -> None:
    both = (
        chunk(delta("a"), delta("b", 1)),
        chunk(delta("c", finish_reason="stop"), delta("d", 1, finish_reason="length")),
    )
    objects = stream(replace(ANSWER, num_choices=2), *both)
    assert all(len(one["choices"]) == 1 for one in objects)
    for index, text, reason in ((0, "ac", "stop"), (1, "bd", "length")):
        own = [one["choices"][0] for one in objects if one["choices"][0]["index"] == index]
        assert [c["delta"].get("role") for c in own] == ["assistant", None, None]
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own] == [None, None, reason]


def test_usage_comes_in_a_last_event_without_choices() -> None:
    objects = stream(replace(ANSWER, include_usage=True), chunk(delta("a", finish_reason="stop")), final(1))
    assert [one["usage"] for one in objects[:-1]] == [None, None]
    assert objects[-1]["choices"] == []
    assert objects[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_continuous_usage_grows_to_the_final_count() -> None:
    answer = replace(ANSWER, num_choices=2, include_usage=True, continuous_usage=True)
    objects = stream(answer, chunk(delta("a")), chunk(delta("b", 1, token_ids=(1, 2))), chunk(delta("c")), final(4))
    counts = [one["usage"]["completion_tokens"] for one in objects]
    assert counts == sorted(counts)
    assert counts[-2:] == [4, 4]


def test_a_token_without_text_yet_makes_no_event_but_keeps_its_place() -> None:
    frames = EventFrames(replace(ANSWER, shape=COMPLETION))
    assert frames.chunk(0, chunk(delta(""))) == b""
    assert frames.chunk(0, chunk(delta("😀"))).startswith(b"id: id1/2\n")


def test_event_ids_tell_how_far_each_prompt_is() -> None:
    frames = EventFrames(replace(ANSWER, shape=COMPLETION, num_prompt_tokens=(5, 5)))
    assert b"id: id1/0,1\n" in frames.chunk(1, chunk(delta("a")))
    assert b"id: id1/1,1\n" in frames.chunk(0, chunk(delta("a")))


def test_an_event_id_stands_on_the_last_event_of_its_chunk() -> None:
    events = EventFrames(ANSWER).chunk(0, chunk(delta("a"))).split(b"\n\n")
    assert [event.startswith(b"id: ") for event in events if event] == [False, True]


def test_a_clients_id_cannot_break_the_event_format() -> None:
    events = EventFrames(replace(ANSWER, id="a\n\ndata: x")).chunk(0, chunk(delta("a")))
    assert all(line.startswith((b"id: ", b"data: {")) for line in events.splitlines() if line)


def test_choices_of_later_prompts_are_numbered_on() -> None:
    answer = replace(ANSWER, shape=COMPLETION, num_choices=2, num_prompt_tokens=(5, 5))
    fold = Fold(answer)
    for prompt in (1, 0):
        fold.add(prompt, chunk(delta(f"{prompt}0"), delta(f"{prompt}1", 1)))
        fold.add(prompt, final(2))
    body = json.loads(fold.body())
    assert [c["text"] for c in body["choices"]] == ["00", "01", "10", "11"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["total_tokens"] == 14


def test_an_event_is_one_line_however_a_client_splits_lines() -> None:
    text = "\n \r \v \f \x1c \x85 \u2028 \u2029"
    events = EventFrames(replace(ANSWER, shape=COMPLETION)).chunk(0, chunk(delta(text))).decode()
    position, data, end = events.splitlines()
    assert json.loads(data.removeprefix("data: "))["choices"][0]["text"] == text
    assert (position, end) == ("id: id1/1", "")


def test_an_error_ends_the_stream_with_an_error_object_and_done() -> None:
    text = EventFrames(ANSWER).failure(InternalError("It broke.").body()).decode()
    first, last = text.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert last == "data: [DONE]"


def test_chat_logprobs_have_tokens_real_bytes_and_alternatives() -> None:
    piece = TokenText(token_id=187, token="�", token_bytes=(0xF0,), logprob=-0.25)
    one = chunk(delta("", logprobs=(piece, token_text("b", num_top=2)), token_ids=(187, 1)))
    (choice,) = (o["choices"][0] for o in stream(ANSWER, one) if o["choices"][0]["logprobs"])
    assert choice["logprobs"]["content"][0] == {
        "token": "�",
        "logprob": -0.25,
        "bytes": [0xF0],
        "top_logprobs": [],
    }
    assert [top["token"] for top in choice["logprobs"]["content"][1]["top_logprobs"]] == ["b", "b1"]
    assert whole(ANSWER, one)["choices"][0]["logprobs"]["content"] == choice["logprobs"]["content"]


def test_completion_logprobs_are_parallel_lists_with_running_offsets() -> None:
    chunks = [chunk(delta(w, logprobs=(token_text(w, num_top=1),))) for w in ("one", " two", " three")]
    answer = replace(ANSWER, shape=COMPLETION)
    logprobs = whole(answer, *chunks)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["one", " two", " three"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"one": -0.5}, {" two": -0.5}, {" three": -0.5}],
        "text_offset": [0, 3, 7],
        "bytes": [list(w.encode()) for w in ("one", " two", " three")],
    }
    streamed = [one["choices"][0]["logprobs"]["text_offset"] for one in stream(answer, *chunks)]
    assert streamed == [[0], [3], [7]]


def test_the_sampled_token_is_among_the_alternatives_of_a_completion() -> None:
    top = (TokenText(token_id=2, token="x", token_bytes=(1,), logprob=-0.1),)
    sampled = TokenText(token_id=1, token="y", token_bytes=(2,), logprob=-3.0, top=top)
    logprobs = COMPLETION.logprobs([sampled], 0)
    assert logprobs["top_logprobs"] == [{"x": -0.1, "y": -3.0}]


def test_token_ids_come_when_asked_for() -> None:
    answer = replace(ANSWER, token_ids=True)
    chunks = [chunk(delta("", token_ids=(7, 8))), chunk(delta("a", token_ids=(9,), finish_reason="stop"))]
    streamed = [one["choices"][0].get("token_ids", []) for one in stream(answer, *chunks)]
    assert sum(streamed, []) == [7, 8, 9] == whole(answer, *chunks)["choices"][0]["token_ids"]


@pytest.mark.parametrize(("shape", "kind"), [(CHAT, ChatCompletion), (COMPLETION, Completion)])
def test_a_whole_answer_has_openais_shape(shape: Any, kind: Any) -> None:
    chunks = chunk(delta("a", finish_reason="stop", logprobs=(token_text("a", 2),))), final(1)
    body = whole(replace(ANSWER, shape=shape), *chunks)
    assert kind.model_validate(body).choices[0].finish_reason == "stop"


DELTAS = st.lists(st.tuples(st.integers(0, 1), st.text(max_size=4), st.booleans()), max_size=12)


@given(DELTAS)
def test_the_streamed_text_joined_is_the_whole_text(pieces: list[tuple[int, str, bool]]) -> None:
    answer = replace(ANSWER, shape=COMPLETION, num_choices=2)
    chunks = [
        chunk(delta(text, index, logprobs=(token_text(text),) if has_logprobs else None))
        for index, text, has_logprobs in pieces
    ]
    body = whole(answer, *chunks)
    for index in (0, 1):
        own = [one["choices"][0] for one in stream(answer, *chunks) if one["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == body["choices"][index]["text"]
