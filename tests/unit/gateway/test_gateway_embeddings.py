"""POST /v1/embeddings: one request per input, OpenAI's shape, and errors that name the body's own fields."""

import base64
import struct
from typing import Any

import httpx
import pytest

from schemas.errors import ContextLengthExceeded, InternalError
from schemas.openai import EmbeddingList
from schemas.output import ChoiceDelta, Usage
from tests.scripted_tokenizer import NUM_PROMPT_TOKENS, ScriptedTokenizer, Writer

EMBEDDINGS = "/v1/embeddings"
VALUES = (0.1, -0.7071067690849304, 1.1754943508222875e-38)


def packed(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


async def embed(writer: Writer) -> None:
    """Answer with the length of the prompt and VALUES."""
    vector = packed(len(writer.request.prompt), *VALUES)
    usage = Usage(prompt_tokens=NUM_PROMPT_TOKENS, completion_tokens=0)
    await writer.write(ChoiceDelta(embedding=vector, finish_reason="stop"), final=True, usage=usage)


@pytest.fixture(autouse=True)
def embedding_pipeline(tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = embed


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["a", "bcd", "ef"], [1, 3, 2]), ([5, 6], [2]), ([[1, 2, 3], [4]], [3, 1])],
)
async def test_each_input_has_its_vector_in_order(http: httpx.AsyncClient, given: Any, lengths: list[int]) -> None:
    response = await http.post(EMBEDDINGS, json={"input": given, "user": "ann"})
    assert response.status_code == 200, response.text
    answer = EmbeddingList.model_validate_json(response.content)
    assert [item.index for item in answer.data] == list(range(len(lengths)))
    assert [item.embedding[0] for item in answer.data] == lengths
    assert answer.model == "smol"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == NUM_PROMPT_TOKENS * len(lengths)


async def test_numbers_and_base64_hold_the_same_float32_values(http: httpx.AsyncClient) -> None:
    as_text = await http.post(EMBEDDINGS, json={"input": "x", "encoding_format": "base64"})
    as_numbers = await http.post(EMBEDDINGS, json={"input": "x", "encoding_format": "float"})
    vector = as_text.json()["data"][0]["embedding"]
    assert vector == packed(1, *VALUES) == packed(*as_numbers.json()["data"][0]["embedding"])


async def test_options_are_passed_on_and_the_mean_is_the_default(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    await http.post(EMBEDDINGS, json={"input": "x"})
    options = {"pooling": "last", "dimensions": 2, "priority": "high", "truncate_prompt_tokens": -1, "timeout_s": 9}
    await http.post(EMBEDDINGS, json={"input": "x", "model": "smol", **options})
    first, second = tokenizer.requests
    assert (first.pooling, first.dimensions, first.deliver, first.model) == ("mean", None, "log", "smol")
    assert {name: getattr(second, name) for name in options} == options


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [1.5]}, "input.0"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": "x", "priority": "urgent"}, "priority"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post(EMBEDDINGS, json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_what_the_pipeline_calls_the_prompt_is_the_input(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.refusal = ContextLengthExceeded("Too long.", param="prompt", max_model_len=8, num_prompt_tokens=9)
    response = await http.post(EMBEDDINGS, json={"input": ["short", "long"]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert error["details"] == {"max_model_len": 8, "num_prompt_tokens": 9}


async def test_an_input_that_fails_fails_the_answer(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    async def fail_second(writer: Writer) -> None:
        await (writer.fail(InternalError("It broke.")) if writer.request.prompt == "b" else embed(writer))

    tokenizer.script = fail_second
    response = await http.post(EMBEDDINGS, json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "It broke.")


async def test_an_end_without_a_vector_is_that_of_another_request_with_the_same_id(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def end(writer: Writer) -> None:
        await writer.end()

    tokenizer.script = end
    answer = await http.post(EMBEDDINGS, json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


async def test_the_options_of_an_embedding_mean_nothing_to_a_completion(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    await http.post("/v1/completions", json={"prompt": "a", "pooling": "mean", "dimensions": 3})
    assert (tokenizer.requests[0].pooling, tokenizer.requests[0].dimensions) == (None, None)


async def test_only_ids_of_our_own_are_said_to_be_new(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    assert (await http.post(EMBEDDINGS, json={"input": ["a", "b"]})).status_code == 200
    assert (await http.post(EMBEDDINGS, json={"input": "a", "request_id": "mine"})).status_code == 200
    assert [request.is_new_id for request in tokenizer.requests] == [True, True, False]
