"""Embeddings from a whole deployment: the official OpenAI client over HTTP, and a plain message over NATS."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import openai
import pytest

MODEL = "smol"
TEXTS = [
    "The toad is an amphibian that lives near ponds.",
    "Frogs and toads are amphibians, which live close to water.",
    "The central bank raised its interest rate again on Thursday.",
]
MAX_MODEL_LEN = 8192


@pytest.fixture
async def client(deployment: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{deployment.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def product(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


async def test_the_openai_client_gets_the_same_vectors_as_numbers_and_as_base64(client: openai.AsyncOpenAI) -> None:
    as_default = await client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64 by itself
    as_numbers = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    raw = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64")
    for default, numbers, text in zip(as_default.data, as_numbers.data, raw.data, strict=True):
        packed = base64.b64decode(str(text.embedding))
        assert struct.pack(f"<{len(default.embedding)}f", *default.embedding) == packed
        assert struct.pack(f"<{len(numbers.embedding)}f", *numbers.embedding) == packed
        assert product(numbers.embedding, numbers.embedding) == pytest.approx(1.0, abs=1e-5)
    assert [item.index for item in raw.data] == [0, 1, 2]
    assert raw.usage.prompt_tokens == raw.usage.total_tokens > 20
    amphibian, same_subject, bank = [item.embedding for item in as_numbers.data]
    assert product(amphibian, same_subject) > product(amphibian, bank)


async def test_alone_among_others_by_token_ids_and_beside_a_generation_the_vector_is_the_same(
    client: openai.AsyncOpenAI, deployment: Any
) -> None:
    alone = (await client.embeddings.create(model=MODEL, input=TEXTS[0])).data[0].embedding
    async with httpx.AsyncClient(base_url=deployment.http_url) as http:
        ids = (await http.post("/tokenize", json={"prompt": TEXTS[0]})).json()["tokens"]
    by_ids, many, _ = await asyncio.gather(
        client.embeddings.create(model=MODEL, input=[ids]),
        client.embeddings.create(model=MODEL, input=[*TEXTS, *(f"{text} " * 40 for text in TEXTS), TEXTS[0]]),
        client.completions.create(model=MODEL, prompt="A toad", max_tokens=30),
    )
    assert by_ids.data[0].embedding == many.data[0].embedding == many.data[6].embedding == alone
    last = await client.embeddings.create(model=MODEL, input=TEXTS[0], extra_body={"pooling": "last"})
    assert last.data[0].embedding != alone


async def test_dimensions_keep_the_beginning_and_are_normalised_again(client: openai.AsyncOpenAI) -> None:
    whole = (await client.embeddings.create(model=MODEL, input=TEXTS[0])).data[0].embedding
    short = (await client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=64)).data[0].embedding
    length = product(whole[:64], whole[:64]) ** 0.5
    assert short == pytest.approx([value / length for value in whole[:64]], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"input": [5] * (MAX_MODEL_LEN + 1)}, "input", "context_length_exceeded"),
        ({"input": "x", "dimensions": 577}, "dimensions", "invalid_parameter"),
        ({"input": ["x", ""]}, "input", "invalid_parameter"),
        ({"input": [[49152]]}, "input", "invalid_parameter"),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_the_field(
    client: openai.AsyncOpenAI, options: Any, param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.embeddings.create(model=MODEL, **options)
    assert (raised.value.param, raised.value.code) == (param, code)
    if code == "context_length_exceeded":
        assert raised.value.body["details"] == {"max_model_len": MAX_MODEL_LEN, "num_prompt_tokens": MAX_MODEL_LEN + 1}


async def test_a_nats_client_gets_the_same_vector(client: openai.AsyncOpenAI, deployment: Any) -> None:
    over_http = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    connection = await nats.connect(deployment.nats_url)
    try:
        inbox = connection.new_inbox()
        replies = await connection.subscribe(inbox)
        body = {"prompt": TEXTS[0], "pooling": "mean"}
        await connection.publish(f"{deployment.prefix}.v1.generate.{MODEL}", json.dumps(body).encode(), reply=inbox)
        accepted = json.loads((await replies.next_msg(timeout=20)).data)
        assert accepted["num_prompt_tokens"] == over_http.usage.prompt_tokens
        chunk = json.loads((await replies.next_msg(timeout=20)).data)
    finally:
        await connection.close()
    assert chunk["final"]
    assert chunk["choices"][0]["embedding"] == over_http.data[0].embedding
