"""The official OpenAI client against a whole deployment: the real pipeline, the real model."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "smol"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
async def client(deployment: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{deployment.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_chat_streamed_and_whole_says_the_same(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**options)
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # of which more were cached by now
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_completions_of_several_prompts_and_choices_are_numbered(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "temperature": 1, "seed": 7, "max_tokens": 8, "n": 2}
    both = await client.completions.create(prompt=["Once upon a time", "The sky is"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = await client.completions.create(prompt="The sky is", **options)
    assert [choice.text for choice in both.choices[2:]] == [choice.text for choice in alone.choices]


async def test_text_and_token_ids_of_a_prompt_are_answered_alike(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    first = await client.completions.create(prompt="Hello", extra_body={"return_token_ids": True}, **options)
    ids = first.choices[0].model_extra["token_ids"]
    assert len(ids) == first.usage.completion_tokens == 8
    assert first.choices[0].finish_reason == "length"
    assert (await client.completions.create(prompt=[ids], **options)).choices[0].text


async def test_logprobs_join_to_the_text(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    chat = await client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    tokens = chat.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == chat.choices[0].message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens)  # greedy takes the likeliest


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 8192)


async def test_tools_are_called_streamed_and_whole_and_an_answer_is_parsed(client: openai.AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str = Field(max_length=20)
        is_big: bool

    tool = openai.pydantic_function_tool(City, name="note_city", description="Notes a city.")
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
    calling: Any = {**options, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    whole = await client.chat.completions.parse(**calling)
    [call] = whole.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)
    async with client.chat.completions.stream(**calling) as stream:
        streamed = await stream.get_final_completion()
    [again] = streamed.choices[0].message.tool_calls or []
    assert again.function.arguments == call.function.arguments
    parsed = await client.chat.completions.parse(**options, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"suffix": "x"})
    assert unsupported.value.param == "suffix"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt=[[5] * 9000], stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        assert "8192" in too_long.value.message
        assert "9000" in too_long.value.message
    for prompt in ("", [""], [], [[]]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=prompt)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=MODEL, messages=[])


async def test_a_stream_that_is_left_makes_room_for_the_next_request(
    client: openai.AsyncOpenAI, deployment: Any
) -> None:
    options: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "stream": True}
    stream = await client.completions.create(**options, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    await stream.close()
    answer = await asyncio.wait_for(client.completions.create(model=MODEL, prompt="Hello", max_tokens=2), 30)
    assert answer.usage.completion_tokens <= 2
    async with httpx.AsyncClient(base_url=deployment.http_url) as http:
        assert (await http.get("/ready")).json() == {"status": "ready"}
