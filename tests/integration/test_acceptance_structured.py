"""Acceptance: structured output, tools, penalties and forced tokens, over HTTP whole and streamed, and over NATS."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from tests.integration.acceptance import C, H, Surface, surface_of
from tests.integration.conftest import Deployment

ASK: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris for 3 days?"}], "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell a city's weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 2000}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
async def surface(deployment: Deployment) -> AsyncIterator[Surface]:
    async with surface_of(deployment) as surface:
        yield surface


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


# ---- structured output


@pytest.mark.parametrize("choices", [['a"b', "c\nd", "é"], ["c\nd"], ["é"]])
async def test_one_of_the_choices_is_taken_exactly(surface: Surface, choices: list[str]) -> None:
    answer = await surface.everywhere(prompt="x", max_tokens=30, temperature=0, structured_outputs={"choice": choices})
    assert answer.text in choices
    assert answer.finish == "stop"


async def test_a_schema_is_followed(surface: Surface) -> None:
    kinds = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "kinds": kinds, "n": number},
        "required": ["city", "kinds", "n"],
        "additionalProperties": False,
    }
    bound: Any = {"max_tokens": 150, "response_format": schema_format(schema)}
    answer = await surface.both(H, **ASK, **bound)
    value = json.loads(answer.text)
    assert set(value) == {"city", "kinds", "n"}
    assert 0 <= value["n"] <= 99
    assert set(value["kinds"]) <= {"a", "b"}
    drawn = [await surface.whole(H, **{**ASK, "temperature": 1.5}, **bound, seed=seed) for seed in range(3)]
    assert all(json.loads(one.text)["n"] <= 99 for one in drawn if one.finish == "stop")


async def test_an_empty_schema_gives_some_json(surface: Surface) -> None:
    answer = await surface.everywhere(prompt="x", max_tokens=60, temperature=0, structured_outputs={"json": {}})
    if answer.finish == "stop":
        json.loads(answer.text)


async def test_json_that_is_cut_short_is_the_beginning_of_json(surface: Surface) -> None:
    body: Any = {"max_tokens": 5, "response_format": {"type": "json_object"}, "bad_words": ["{}"]}
    answer = await surface.both(H, **ASK, **body)
    assert answer.text.lstrip().startswith("{")
    assert answer.finish == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "string", "pattern": "(?=a)b"})}, "response_format"),
        ({"response_format": schema_format({"type": "object", "propertyNames": {"pattern": "^a"}})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}}, "response_format"),
        ({"response_format": schema_format(123)}, "response_format"),
        ({"response_format": {"type": "sound"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_followed_is_refused(surface: Surface, fields: dict[str, Any], param: str) -> None:
    assert (await surface.refused(H, {**ASK, **fields}))["param"] == param
    assert (await surface.over_nats(prompt="x", **fields))["param"] == param  # type: ignore[index]


async def test_pattern_properties_are_honoured(surface: Surface) -> None:
    schema = {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}
    answer = await surface.both(H, **ASK, max_tokens=60, response_format=schema_format(schema))
    if answer.finish == "stop":
        assert all(key.startswith("n_") and isinstance(value, int) for key, value in json.loads(answer.text).items())


# ---- tools


async def test_a_required_call_streams_arguments_that_join_to_those_of_the_whole_answer(surface: Surface) -> None:
    body: Any = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    answer = await surface.both(H, **ASK, **body)
    [[_, name, arguments]] = answer.calls
    assert (name in {"get_weather", "now"}, answer.finish, answer.text) == (True, "tool_calls", "")
    if name == "get_weather":
        assert isinstance(json.loads(arguments)["days"], int)


async def test_a_named_tool_is_called(surface: Surface) -> None:
    answer = await surface.both(H, **ASK, tools=[WEATHER, NOW], tool_choice=NAMED, max_tokens=60)
    [[_, name, arguments]] = answer.calls
    assert (name, json.loads(arguments)) == ("now", {})


async def test_a_call_that_is_cut_short_finishes_with_length(surface: Surface) -> None:
    answer = await surface.both(H, **ASK, tools=[WEATHER], tool_choice="required", max_tokens=18)
    assert answer.finish == "length"


async def test_a_plain_answer_with_tools_at_hand_has_a_finish_reason(surface: Surface) -> None:
    for choice in ("auto", "none"):
        answer = await surface.both(H, **ASK, tools=[NOW], tool_choice=choice, max_tokens=12, bad_words=["<"])
        assert answer.finish in ("stop", "length")
        assert answer.calls == []


async def test_a_tools_result_is_read_in_the_next_turn(surface: Surface) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Sunny"},
    ]
    text = (await surface.http.post("/tokenize", json={"messages": turns, "return_token_strs": True})).json()
    prompt = "".join(text["token_strs"])
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\nSunny\n</tool_response>" in prompt
    assert (await surface.both(H, messages=turns, temperature=0, max_tokens=8)).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_tools_that_make_no_sense_are_refused(surface: Surface, fields: dict[str, Any], param: str) -> None:
    assert (await surface.refused(H, {**ASK, **fields}))["param"] == param


async def test_the_official_client_calls_tools_and_parses_structured_output(deployment: Deployment) -> None:
    class Place(pydantic.BaseModel):
        city: str
        days: int

    base_url = f"{deployment.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(
            model="smol", **ASK, tools=[WEATHER], tool_choice="required", max_tokens=80, parallel_tool_calls=False
        )
        [call] = chat.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments)["city"]
        parsed = await client.chat.completions.parse(model="smol", **ASK, response_format=Place, max_tokens=80)
        assert isinstance(parsed.choices[0].message.parsed, Place)


# ---- what shapes the choice of tokens


async def test_forced_and_excluded_tokens(surface: Surface) -> None:
    body: Any = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 3}
    assert (await surface.everywhere(**body, logit_bias={"198": 100})).text == "\n\n\n"
    assert (await surface.everywhere(**body, allowed_token_ids=[198])).text == "\n\n\n"
    assert "Paris" in (await surface.everywhere(**body)).text
    assert "Paris" not in (await surface.everywhere(**body, bad_words=["Paris"])).text
    assert (await surface.everywhere(**body, allowed_token_ids=[2, 198], min_tokens=3)).text == "\n\n\n"


async def test_penalties_change_the_text_and_no_other_request(surface: Surface) -> None:
    body: Any = {"prompt": "ha ha ha ha ha ha", "temperature": 0, "max_tokens": 16}
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    options: list[dict[str, float]] = [{}, *({name: 2.0} for name in penalties)]
    alone = [(await surface.both(C, **body, **option)).text for option in options]
    together = await asyncio.gather(*(surface.whole(C, **body, **option) for option in options))
    assert [answer.text for answer in together] == alone
    assert alone[0] != alone[1]
    assert alone[0] != alone[2]


async def test_a_long_string_inside_an_object_is_a_fine_argument(surface: Surface) -> None:
    inner = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 2000}},
        "required": ["text"],
        "additionalProperties": False,
    }
    function = {**WEATHER["function"], "parameters": {**inner, "properties": {"text": inner}}}
    tools = [{"type": "function", "function": function}]
    called = await surface.both(H, **ASK, tools=tools, tool_choice="required", max_tokens=120)
    assert called.calls
    assert called.finish in ("tool_calls", "length")
