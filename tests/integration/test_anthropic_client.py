"""The official Anthropic client, unmodified, against a whole deployment: the real pipeline, the real model."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY: Any = {"model": "smol", "max_tokens": 24, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ONE_CALL: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def client(deployment: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=deployment.http_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_streamed_and_whole_says_the_same(client: Any) -> None:
    whole = client.messages.create(messages=QUESTION, **GREEDY)
    [block] = whole.content
    assert "Paris" in block.text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(messages=QUESTION, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="smol", messages=QUESTION).input_tokens
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_a_tool_is_called_streamed_and_whole_and_its_result_is_taken(client: Any) -> None:
    options = {**GREEDY, **ONE_CALL, "max_tokens": 100, "messages": ASKED}
    whole = client.messages.create(**options)
    [use] = whole.content
    assert (use.name, set(use.input), whole.stop_reason) == ("get_weather", {"city", "days"}, "tool_use")
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in final.content] == [(use.name, use.input)]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny, 20 degrees"}]}
    turns = [*ASKED, whole.to_param(), {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY)
    assert after.content[0].text
    cut = client.messages.create(**{**options, "max_tokens": 20})
    assert cut.stop_reason == "max_tokens"
    assert set(cut.content[0].input) <= {"city", "days"}


def test_stops_beginnings_and_system_prompts_are_honoured(client: Any) -> None:
    stopped = client.messages.create(messages=QUESTION, stop_sequences=[" is"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert " is" not in stopped.content[0].text
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    assert client.messages.create(messages=begun, **GREEDY).content[0].text.startswith(" Paris")
    plain = client.messages.create(messages=QUESTION, **GREEDY).usage
    told = client.messages.create(messages=QUESTION, system="You are a toad. " * 20, **GREEDY).usage
    assert told.input_tokens + told.cache_read_input_tokens > plain.input_tokens + plain.cache_read_input_tokens


def test_an_answer_is_parsed_into_a_model(client: Any) -> None:
    class City(BaseModel):
        name: str
        is_big: bool

    answer = client.messages.parse(messages=QUESTION, output_format=City, **{**GREEDY, "max_tokens": 100})
    assert isinstance(answer.parsed_output, City)


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", max_tokens=5, messages=QUESTION)
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    assert unknown.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    with pytest.raises(anthropic.BadRequestError, match="8192"):
        client.messages.create(messages=[{"role": "user", "content": "word " * 9000}], **GREEDY)
