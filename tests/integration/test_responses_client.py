"""The official OpenAI client's Responses, unmodified, against a whole deployment: the real pipeline, the real model."""

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

QUESTION = "What is the capital of France? Answer in one sentence."
GREEDY: Any = {"model": "smol", "temperature": 0, "max_output_tokens": 24}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ONE_CALL: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def client(deployment: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_streamed_whole_and_retrieved_says_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, **GREEDY)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert client.responses.retrieve(whole.id) == whole
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert final.output_text == whole.output_text
    assert (final.usage or whole.usage).total_tokens == (whole.usage or final.usage).total_tokens


def test_a_response_is_made_in_the_background_and_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(input=QUESTION, background=True, **GREEDY)
    assert made.status == "queued"
    deadline = time.monotonic() + 30
    while made.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.02)
        made = client.responses.retrieve(made.id)
    assert (made.status, "Paris" in made.output_text) == ("completed", True)
    endless: Any = {"ignore_eos": True, "max_output_tokens": 4000}
    stream = client.responses.create(input="Count.", background=True, stream=True, extra_body=endless, model="smol")
    begun = next(event for event in stream if event.type == "response.output_text.delta")
    stream.close()
    name = begun.item_id.replace("msg_", "resp_")
    assert client.responses.retrieve(name).status == "in_progress"
    assert client.responses.cancel(name).status == "cancelled"
    events = list(client.responses.retrieve(name, stream=True, starting_after=2))
    assert events[0].sequence_number == 3
    assert events[-1].type == "response.failed"


def test_a_conversation_with_a_tool_goes_on_from_its_responses(client: openai.OpenAI) -> None:
    options = {**GREEDY, **ONE_CALL, "max_output_tokens": 100, "input": "What is the weather in Paris?"}
    called = client.responses.create(**options)
    [call] = called.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    streamed = list(client.responses.create(**options, stream=True))
    pieces = [event.delta for event in streamed if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 20 degrees"}
    after = client.responses.create(input=[result], previous_response_id=called.id, **GREEDY)
    assert after.output_text
    listed = [item.type for item in client.responses.input_items.list(after.id, order="asc")]
    assert listed == ["message", "function_call", "function_call_output"]


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str
        is_big: bool

    answer = client.responses.parse(input=QUESTION, text_format=City, **{**GREEDY, "max_output_tokens": 100})
    assert isinstance(answer.output_parsed, City)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="x", previous_response_id="resp_gone", **GREEDY)
    assert (missing.value.code, missing.value.param) == ("output_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(input="word " * 9000, **GREEDY)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    for options, param in (
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"pattern": "("}}}}, "text.format"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(input="x", **GREEDY, **options)
        assert (refused.value.param or "").startswith(param), options
