"""OpenAI bodies become requests of the pipeline, or errors that name the field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidParameter, InvalidRequest, MalformedMessage
from schemas.openai import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest
from services.gateway.translate import Translation, parse_body, translate_chat, translate_completion

MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> Translation:
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    return translate_chat(parse_body(ChatCompletionRequest, body), "smol", "id1")


def completion(**fields: Any) -> Translation:
    body = json.dumps({"prompt": "Hello", **fields}).encode()
    return translate_completion(parse_body(CompletionRequest, body), "smol", "id1")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "you"], ["Hello", "you"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ("", [""]),
        ([""], [""]),
        ([[]], [()]),
    ],
)
def test_each_form_of_prompt_becomes_one_request_per_prompt(prompt: Any, prompts: list[Any]) -> None:
    translation = completion(prompt=prompt)
    assert [request.prompt for request in translation.requests] == prompts


def test_several_prompts_get_ids_of_their_own_and_share_everything_else() -> None:
    first, second = completion(prompt=["a", "b"], temperature=0.5, stop=["x"]).requests
    assert (first.request_id, second.request_id) == ("id1-0", "id1-1")
    assert first.model_copy(update={"prompt": "b", "request_id": "id1-1"}) == second


def test_fields_keep_their_names_and_defaults_are_the_gateways() -> None:
    (request,) = chat(temperature=0.5, top_k=3, stop=["a"], n=2, seed=7, priority="low", suffix="x").requests
    assert (request.model, request.request_id, request.deliver) == ("smol", "id1", "log")
    assert (request.temperature, request.top_k, request.stop, request.n, request.seed) == (0.5, 3, ("a",), 2, 7)
    assert request.priority == "low"
    assert request.model_extra == {"suffix": "x"}
    assert request.max_tokens is None


def test_what_the_gateway_does_itself_is_not_passed_on() -> None:
    translation = chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True, deliver="reply")
    (request,) = translation.requests
    assert request.model_extra == {}
    assert request.deliver == "log"
    assert translation.options.stream
    assert translation.options.include_usage
    assert translation.options.token_ids


def test_a_clients_own_id_names_the_answer() -> None:
    assert chat(request_id="mine").id == "mine"
    assert [r.request_id for r in completion(prompt=["a", "b"], request_id="mine").requests] == ["mine-0", "mine-1"]


def test_null_means_left_out() -> None:
    (request,) = chat(n=None, stop=None, temperature=None, min_tokens=None, model=None, tools=None).requests
    assert (request.n, request.stop, request.model, request.model_extra) == (1, None, "smol", {})


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5).requests[0].max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).requests[0].max_tokens == 6


def test_completions_generate_sixteen_tokens_unless_told_otherwise() -> None:
    assert completion().requests[0].max_tokens == 16
    assert completion(max_tokens=3).requests[0].max_tokens == 3
    assert completion(max_tokens=None).requests[0].max_tokens is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).requests[0].logprobs == logprobs


def test_completion_logprobs() -> None:
    assert [completion(logprobs=k).requests[0].logprobs for k in (None, 0, 5)] == [None, 0, 5]


def test_content_parts_are_passed_on() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = chat(messages=[{"role": "user", "content": parts}]).requests
    assert request.messages is not None
    assert [part.text for part in request.messages[0].content or ()] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**40}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages.0.role"),
        ({"model": 5}, "model"),
        ({"stop": 5}, "stop"),
        ({"request_id": ""}, "request_id"),
        ({"priority": "urgent"}, "priority"),
        ({"ignore_eos": "true"}, "ignore_eos"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ([1, "a"], "prompt.1"),
        ([[1], "a"], "prompt.1"),
        ([True], "prompt.0"),
        ([[1, 2.5]], "prompt.0.1"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"null", b'"a"', b"\xff{}", b'{"prompt":"\\ud800"}', b"[" * 10**5]
)
def test_what_is_no_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_body(CompletionRequest, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "model", "n", "stop", "logprobs", "stream", "stream_options", "seed", "request_id", "echo"]
)


@given(st.dictionaries(FIELDS, JSON))
def test_any_json_object_is_translated_or_refused_with_a_coded_error(fields: dict[str, Any]) -> None:
    for translate in (chat, completion):
        try:
            translation = translate(**fields)
        except InvalidRequest:
            continue
        assert translation.requests
