"""Every request is turned into work, or into an error that names the field."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import decode, encode
from schemas.errors import NatterjackError
from schemas.generation import NEUTRAL_VALUES, UNSUPPORTED_PARAMETERS, GenerateRequest, WorkItem
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.validation import Arrival, Validator
from services.tokenizer.vocabulary import BYTE_CHAT_TEMPLATE, BYTE_VOCABULARY_END, byte_vocabulary

BYTES = byte_vocabulary()
TEMPLATE = ChatTemplate(BYTE_CHAT_TEMPLATE, BYTES.template_tokens)
WITH_TEMPLATE = Validator("smol", BYTES, TEMPLATE)
MAX_MODEL_LEN = 100
ARRIVAL = Arrival("req-1", 1000.0, 7, "tokenizer-0", "_INBOX.1", None)
HI = [{"role": "user", "content": "hi"}]


def work_of(body: bytes, validator: Validator = WITH_TEMPLATE) -> WorkItem:
    request = decode(GenerateRequest, {}, body)
    validator.check(request)
    return validator.to_work(request, validator.encode(request), ARRIVAL, MAX_MODEL_LEN)


def accepted(**fields: Any) -> WorkItem:
    return work_of(json.dumps({"prompt": "ab", **fields}).encode())


def refusal(body: bytes | dict[str, Any], validator: Validator = WITH_TEMPLATE) -> NatterjackError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(NatterjackError) as raised:
        work_of(raw, validator)
    error = raised.value
    assert len(error.message) < 2000
    return error


def test_defaults_are_resolved() -> None:
    work = accepted()
    assert (work.prompt_token_ids, work.max_tokens, work.n) == ((97, 98), 98, 1)
    assert (work.sampling.temperature, work.sampling.top_k, work.sampling.top_p, work.sampling.seed) == (1, 0, 1, 7)
    assert work.stop_token_ids == work.end_token_ids == (BYTE_VOCABULARY_END,)
    assert (work.output.reply, work.output.num_prompt_tokens, work.tokenizer) == ("_INBOX.1", 2, "tokenizer-0")
    assert (work.deadline_s, work.output.stop, work.output.num_logprobs) == (None, (), None)


def test_everything_asked_for_arrives() -> None:
    work = accepted(
        temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, seed=42, n=3, max_tokens=10, min_tokens=2, stop=["x", "y"],
        stop_token_ids=[5, 5, 6], include_stop_str_in_output=True, skip_special_tokens=False, logprobs=4,
        priority="high", timeout_s=2.5, deliver="log", request_id="mine",
    )  # fmt: skip
    assert (work.sampling.temperature, work.sampling.top_k, work.sampling.seed) == (0.5, 40, 42)
    assert (work.sampling.min_p, work.sampling.min_tokens, work.sampling.num_logprobs) == (0.1, 2, 4)
    assert (work.n, work.max_tokens, work.priority, work.deadline_s) == (3, 10, "high", 1002.5)
    assert work.stop_token_ids == (5, 6, BYTE_VOCABULARY_END)  # stops of the request do not replace the model's own
    assert (work.output.stop, work.output.include_stop, work.output.skip_special_tokens) == (("x", "y"), True, False)
    assert work.output.reply is None


def test_ignore_eos_leaves_only_the_requests_stops() -> None:
    work = accepted(ignore_eos=True, stop_token_ids=[3])
    assert (work.stop_token_ids, work.end_token_ids) == ((3,), (BYTE_VOCABULARY_END,))


def test_seeds_of_both_signs_are_one_number() -> None:
    assert accepted(seed=-1).sampling.seed == 2**64 - 1
    assert accepted(seed=2**63 - 1).sampling.seed == 2**63 - 1


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_top_k_off_has_several_names(top_k: int | None) -> None:
    assert accepted(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize("stop", [None, [], "a", ["a"] * 64, ["x" * 1024]])
def test_legal_stops(stop: Any) -> None:
    accepted(stop=stop)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "invalid_parameter", "prompt"),
        ({"prompt": []}, "invalid_parameter", "prompt"),
        ({"prompt": [""]}, "invalid_parameter", "prompt"),
        ({"prompt": [[]]}, "invalid_parameter", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_parameter", "prompt"),
        ({"prompt": [-1]}, "invalid_parameter", "prompt"),
        ({"prompt": [257]}, "invalid_parameter", "prompt"),
        ({"prompt": [2**70]}, "invalid_parameter", "prompt"),
        ({"prompt": [1.0]}, "invalid_parameter", "prompt"),
        ({"prompt": [True]}, "invalid_parameter", "prompt"),
        ({"prompt": 5}, "invalid_parameter", "prompt"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"messages": HI}, "invalid_request", "prompt"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"model": "x" * 500_000}, "model_not_found", "model"),
        ({"top_p": 0}, "invalid_parameter", "top_p"),
        ({"top_p": 1.0001}, "invalid_parameter", "top_p"),
        ({"top_k": -2}, "invalid_parameter", "top_k"),
        ({"top_k": "5"}, "invalid_parameter", "top_k"),
        ({"min_p": 2}, "invalid_parameter", "min_p"),
        ({"temperature": -0.1}, "invalid_parameter", "temperature"),
        ({"temperature": 2.1}, "invalid_parameter", "temperature"),
        ({"temperature": "hot"}, "invalid_parameter", "temperature"),
        ({"seed": 2**63}, "invalid_parameter", "seed"),
        ({"seed": 1.5}, "invalid_parameter", "seed"),
        ({"n": 0}, "invalid_parameter", "n"),
        ({"n": 1_000_000_000}, "invalid_parameter", "n"),
        ({"n": True}, "invalid_parameter", "n"),
        ({"n": 2, "temperature": 0}, "invalid_parameter", "n"),
        ({"max_tokens": -1}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 99}, "context_length_exceeded", "max_tokens"),
        ({"max_tokens": 10**30}, "context_length_exceeded", "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_parameter", "min_tokens"),
        ({"min_tokens": -1}, "invalid_parameter", "min_tokens"),
        ({"stop": ""}, "invalid_parameter", "stop"),
        ({"stop": [""]}, "invalid_parameter", "stop"),
        ({"stop": ["a", ""]}, "invalid_parameter", "stop"),
        ({"stop": ["x" * 1025]}, "invalid_parameter", "stop"),
        ({"stop": ["a"] * 65}, "invalid_parameter", "stop"),
        ({"stop": [1]}, "invalid_parameter", "stop"),
        ({"stop_token_ids": [257]}, "invalid_parameter", "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "invalid_parameter", "stop_token_ids"),
        ({"logprobs": 21}, "invalid_parameter", "logprobs"),
        ({"logprobs": True}, "invalid_parameter", "logprobs"),
        ({"priority": "urgent"}, "invalid_parameter", "priority"),
        ({"timeout_s": 0}, "invalid_parameter", "timeout_s"),
        ({"request_id": ""}, "invalid_parameter", "request_id"),
        ({"request_id": "x" * 129}, "invalid_parameter", "request_id"),
        ({"request_id": "a\r\nNats-Expected-Stream: X"}, "invalid_parameter", "request_id"),
        ({"request_id": "a\n"}, "invalid_parameter", "request_id"),
        ({"deliver": "post"}, "invalid_parameter", "deliver"),
        ({"prompt": "x" * 100}, "context_length_exceeded", "prompt"),
    ],
)
def test_wrong_value_is_refused_naming_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal({"prompt": "ab", **fields})
    assert (error.code, error.param) == (code, param)
    assert error.http_status in (400, 404)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_parameter", "messages"),
        ({"messages": "hi"}, "invalid_parameter", "messages"),
        ({"messages": [{"content": "x"}]}, "invalid_parameter", "messages.0.role"),
        ({"messages": [{"role": "", "content": "x"}]}, "invalid_parameter", "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_parameter", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "invalid_parameter",
            "messages.0.content",
        ),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "context_length_exceeded", "messages"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "invalid_parameter",
            "continue_final_message",
        ),
    ],
)
def test_wrong_conversation_is_refused_naming_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(fields)
    assert (error.code, error.param) == (code, param)


def test_conversations_are_rendered() -> None:
    work = work_of(json.dumps({"messages": HI}).encode())
    assert bytes(work.prompt_token_ids) == b"user: hi\nassistant: "
    answer = [*HI, {"role": "assistant", "content": "well"}]
    work = work_of(json.dumps({"messages": answer, "continue_final_message": True}).encode())
    assert bytes(work.prompt_token_ids) == b"user: hi\nassistant: well"
    work = work_of(json.dumps({"messages": [{"role": "user", "content": ""}]}).encode())
    assert bytes(work.prompt_token_ids) == b"user: \nassistant: "


def test_model_without_a_template_says_what_to_do() -> None:
    error = refusal({"messages": HI}, Validator("smol", BYTES, None))
    assert (error.code, error.param) == ("invalid_parameter", "messages")
    assert "/v1/completions" in error.message


def test_over_long_prompt_is_told_both_numbers() -> None:
    error = refusal({"prompt": "x" * 9000})
    assert error.message == (
        "This model's maximum context length is 100 tokens. However, your prompt contains 9000 input tokens."
    )
    assert error.details == {"max_model_len": 100, "num_prompt_tokens": 9000}
    error = refusal({"prompt": "ab", "max_tokens": 99})
    assert error.details == {"max_model_len": 100, "num_prompt_tokens": 2}
    assert accepted(max_tokens=98).max_tokens == 98
    assert accepted(prompt="x" * 99).max_tokens == 1


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_half_a_million_stops_are_refused_at_once_with_the_limit(name: str) -> None:
    value: list[Any] = ["stop"] * 500_000 if name == "stop" else [1] * 500_000
    body = json.dumps({"prompt": "ab", name: value}).encode()
    begin = time.perf_counter()
    error = refusal(body)
    assert time.perf_counter() - begin < 1.0
    assert error.param == name
    assert "500000" in error.message
    assert "at most" in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_PARAMETERS))
def test_unsupported_option_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    error = refusal({"prompt": "ab", name: {"any": "thing"}})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    accepted(**{name: None})
    if name in NEUTRAL_VALUES:
        accepted(**{name: NEUTRAL_VALUES[name]})


@pytest.mark.parametrize("fields", [{"functions": []}, {"suffix": "x"}, {"best_of": 2}])
def test_option_that_asks_for_something_is_refused(fields: dict[str, Any]) -> None:
    assert refusal({"prompt": "ab", **fields}).code == "unsupported_parameter"


def test_unknown_fields_are_ignored() -> None:
    accepted(user="ann", metadata={"a": 1}, store=True, something_new=[1, {"x": None}])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": "a"} x'],
)
def test_what_is_no_json_object_is_malformed(body: bytes) -> None:
    assert refusal(body).http_status == 400


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused(value: bytes) -> None:
    assert refusal(b'{"prompt": "a", "temperature": ' + value + b"}").http_status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["", "a", "high"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
field_values = st.one_of(
    json_values,
    st.integers(-3, 300),
    st.lists(st.integers(-2, 300), max_size=5),
    st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": json_values}), max_size=3),
)
requests = st.dictionaries(
    st.sampled_from([*GenerateRequest.model_fields, *sorted(UNSUPPORTED_PARAMETERS)[:4]]) | st.text(max_size=8),
    field_values,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(fields=requests, has_prompt=st.booleans())
def test_any_request_is_work_or_a_coded_error(fields: dict[str, Any], has_prompt: bool) -> None:
    body = json.dumps({"prompt": "ab", **fields} if has_prompt else fields).encode()
    try:
        work = work_of(body)
    except NatterjackError:  # and nothing else
        return
    assert decode(WorkItem, {}, encode(work)) == work
    assert 1 <= work.max_tokens <= MAX_MODEL_LEN - len(work.prompt_token_ids)


@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_a_coded_error(body: bytes) -> None:
    with pytest.raises(NatterjackError):
        work_of(body)
