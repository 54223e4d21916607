"""Official clients try again by themselves when the queue is full: status and Retry-After are what they wait for."""

from typing import Any

import openai
import pytest

from schemas.errors import QueueFull, Unavailable
from tests.scripted_tokenizer import ScriptedTokenizer
from tests.unit.gateway.gateway_traffic import Served

TURNS: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_retries(serve: Served, tokenizer: ScriptedTokenizer, stream: bool) -> None:
    tokenizer.refusals = [Unavailable("Away.") if stream else QueueFull("Full.")]
    async with serve() as (_, url), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.responses.create(model="smol", input="Hello", stream=stream)
        if stream:
            assert [event.type async for event in answer][-1] == "response.completed"
    assert len(tokenizer.requests) == 1


async def test_anthropic_retries(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
    tokenizer.refusals = [QueueFull("Full.")]
    async with serve() as (_, url), anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        answer = await client.messages.create(model="smol", max_tokens=9, messages=TURNS)
        assert answer.content[0].text == "alpha beta gamma"
        tokenizer.refusal = QueueFull("Full.")
        patient = client.with_options(max_retries=0)
        with pytest.raises(anthropic.OverloadedError):
            await patient.messages.create(model="smol", max_tokens=9, messages=TURNS)
    assert len(tokenizer.requests) == 1
