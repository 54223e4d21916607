"""Acceptance: what is wrong is a 400 that names the field, on both doors, and hurts nobody."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.acceptance import C, H, Surface, surface_of
from tests.integration.conftest import Deployment

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def surface(deployment: Deployment) -> AsyncIterator[Surface]:
    async with surface_of(deployment) as surface:
        yield surface


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [-1], [49152], [2**63], ["a", 1], 7, None, {"a": 1}])
async def test_a_prompt_without_tokens_is_refused(surface: Surface, prompt: Any) -> None:
    assert (await surface.refused(C, {"prompt": prompt}))["param"].split(".")[0] == "prompt"


async def test_messages_must_be_there_but_may_be_empty_texts(surface: Surface) -> None:
    assert (await surface.refused(H, {"messages": []}))["param"] == "messages"
    assert (await surface.whole(H, messages=[{"role": "user", "content": ""}], max_tokens=2)).finish
    assert (await surface.whole(H, messages=[{"role": "assistant", "content": "Well"}], max_tokens=2)).finish
    await surface.refused(H, {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": 7}]}]})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    both = [(await surface.http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})).json()
            for content in (parts, "one\ntwo")]  # fmt: skip
    assert both[0] == both[1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:50])
async def test_a_wrong_value_is_refused_by_name_on_both_doors(
    surface: Surface, fields: dict[str, Any], param: str
) -> None:
    for path, prompt in ((C, {"prompt": "x"}), (H, {"messages": HI})):
        error = await surface.refused(path, {**prompt, **fields})
        assert error["param"].split(".")[0] == param, error
        assert (await surface.refused(path, {**prompt, **fields, "stream": True}))["param"] == error["param"]
    over_nats = await surface.over_nats(prompt="x", **fields)
    assert isinstance(over_nats, dict)
    assert over_nats["param"].split(".")[0] == param


async def test_options_of_the_endpoints_are_checked_too(surface: Surface) -> None:
    refused = [
        (await surface.refused(H, {"messages": HI, "stream_options": {}}))["param"],
        (await surface.refused(H, {"messages": HI, "top_logprobs": 5}))["param"],
        (await surface.refused(H, {"messages": HI, "logprobs": True, "top_logprobs": "5"}))["param"],
        (await surface.refused(C, {"prompt": "x", "logprobs": 21}))["param"],
        (await surface.refused(H, {"messages": HI, "echo": True}))["param"],
        (await surface.refused(C, {"prompt": "x", "prompt_logprobs": 1, "stream": True}))["param"],
    ]
    assert refused == ["stream_options", "top_logprobs", "top_logprobs", "logprobs", "echo", "prompt_logprobs"]
    await surface.refused(C, b'{"prompt": "x", "logit_bias": {"5": NaN}}')


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overlong_prompt_is_refused_before_any_byte(surface: Surface, stream: bool) -> None:
    error = await surface.refused(C, {"prompt": [5] * 9000, "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens."
    )
    assert (error["details"]["max_model_len"], error["details"]["num_prompt_tokens"]) == (8192, 9000)


async def test_the_official_client_raises_its_own_errors(deployment: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{deployment.http_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="smol", messages=HI, logit_bias={"abc": 1})
        assert (refused.value.param, refused.value.code) == ("logit_bias", "invalid_parameter")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=HI)


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"x" * (5 << 20), "application/json", 413),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_body_that_is_no_request_has_the_standard_error(
    surface: Surface, body: bytes, content_type: str, status: int
) -> None:
    for path in (C, H, "/tokenize", "/detokenize"):
        try:
            response = await surface.http.post(path, content=body, headers={"content-type": content_type})
        except httpx.WriteError:  # refused before all of it was sent
            continue
        assert response.status_code == status
        assert {"message", "type", "param", "code"} <= set(response.json()["error"])


async def test_what_http_refuses_is_refused_over_nats_too(surface: Surface) -> None:
    for prompt in ("", []):
        assert isinstance(await surface.over_nats(prompt=prompt), dict)
        await surface.refused(C, {"prompt": prompt, "stream": True})
    too_long = await surface.over_nats(prompt=[5] * 9000)
    assert isinstance(too_long, dict)
    assert too_long["code"] == "context_length_exceeded"
    assert too_long["details"] == {"max_model_len": 8192, "num_prompt_tokens": 9000}
    without_messages = await surface.over_nats(messages=[])
    assert isinstance(without_messages, dict)
    assert without_messages["param"] == "messages"


@pytest.mark.parametrize("messages", [[{"role": "user", "content": ""}], [{"role": "assistant", "content": "Well"}]])
async def test_odd_but_legal_chats_are_answered_on_every_path(surface: Surface, messages: Any) -> None:
    assert (await surface.both(H, messages=messages, max_tokens=2, temperature=0)).finish
    assert not isinstance(await surface.over_nats(messages=messages, max_tokens=2), dict)
