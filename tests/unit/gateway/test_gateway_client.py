"""The official OpenAI client against a gateway on a real port, with a scripted pipeline."""

from collections.abc import AsyncIterator

import openai
import pytest

from schemas.errors import ContextLengthExceeded, InternalError, QueueFull
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, endless
from tests.unit.gateway.gateway_traffic import HELLO, Served


@pytest.fixture
async def client(serve: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serve() as (_, url), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_it_gets_chat_completions_and_completions(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="smol", **HELLO)
    assert chat.choices[0].message.content == "alpha beta gamma"
    completion = await client.completions.create(model="smol", prompt="x")
    assert completion.choices[0].text == "alpha beta gamma"


async def test_it_streams_both_with_usage(client: openai.AsyncOpenAI) -> None:
    options = {"include_usage": True}
    chat = await client.chat.completions.create(model="smol", stream=True, stream_options=options, **HELLO)
    chunks = [chunk async for chunk in chat]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "alpha beta gamma"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 3
    completion = await client.completions.create(model="smol", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in completion]) == "alpha beta gamma"


async def test_it_reads_logprobs(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="smol", logprobs=True, top_logprobs=2, **HELLO)
    tokens = chat.choices[0].logprobs.content
    assert [token.token for token in tokens] == ["alpha", " beta", " gamma"]
    assert bytes(tokens[0].bytes) == b"alpha"
    assert len(tokens[0].top_logprobs) == 2
    completion = await client.completions.create(model="smol", prompt="x", logprobs=1)
    assert completion.choices[0].logprobs.tokens == ["alpha", " beta", " gamma"]


async def test_it_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smol"]
    assert (await client.models.retrieve("smol")).id == "smol"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")


async def test_it_raises_its_own_errors(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-9", **HELLO)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="smol", top_p=7, **HELLO)
    assert bad.value.param == "top_p"
    tokenizer.refusal = ContextLengthExceeded("Too long.", max_model_len=10, num_prompt_tokens=20)
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(model="smol", stream=True, **HELLO)
    assert too_long.value.code == "context_length_exceeded"
    tokenizer.refusal = QueueFull("Too many.")
    with pytest.raises(openai.InternalServerError) as busy:
        await client.completions.create(model="smol", prompt="x")
    assert busy.value.status_code == 503


async def test_it_raises_an_error_within_a_stream(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await writer.fail(InternalError("It broke."))

    tokenizer.script = script
    stream = await client.chat.completions.create(model="smol", stream=True, **HELLO)
    with pytest.raises(openai.APIError, match="It broke"):
        async for _ in stream:
            pass


async def test_closing_its_stream_cancels(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer, eventually) -> None:
    tokenizer.script = endless
    stream = await client.chat.completions.create(model="smol", stream=True, **HELLO)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await eventually(lambda: tokenizer.cancelled, 1.0)
