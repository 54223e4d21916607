"""Acceptance: stop strings, UTF-8, tokens and logprobs, over HTTP whole and streamed, and over NATS."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.acceptance import C, H, Surface, surface_of
from tests.integration.conftest import Deployment

CHAT: Any = {"messages": [{"role": "user", "content": "Count."}], "temperature": 0}
FROG = [187, 249, 242, 218]  # the bytes of 😀, a token each


@pytest.fixture
async def surface(deployment: Deployment) -> AsyncIterator[Surface]:
    async with surface_of(deployment) as surface:
        yield surface


def forced(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is `text`."""
    return {"prompt": "x", "max_tokens": 64, "structured_outputs": {"choice": [text]}, **fields}


# ---- stop strings


async def test_a_stop_string_may_span_tokens(surface: Surface) -> None:
    answer = await surface.everywhere(**forced("alpha beta gamma delta", stop=["beta gamma"]))
    assert answer.shown == ("alpha ", "stop", "beta gamma")


async def test_no_delta_holds_any_part_of_a_stop_string(surface: Surface) -> None:
    answer = await surface.everywhere(**forced("say Observation now", stop=["Observation"]))
    assert answer.text == "say "
    assert all("O" not in piece for piece in answer.pieces)


async def test_the_first_token_is_shown_though_there_are_stop_strings(surface: Surface) -> None:
    body: Any = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
    events = await surface.events(C, **body, stop=["ZZZZZZZZZZ"], return_token_ids=True)
    [first] = events[0]["choices"]
    assert first["text"]
    assert len(first["token_ids"]) < 10  # one, or a few if this client was slow


async def test_tokens_count_up_to_the_one_that_completes_the_stop_string(surface: Surface) -> None:
    text = "one, two, three, four, five"
    answer = await surface.everywhere(**forced(text, stop=["three"], return_token_ids=True))
    assert answer.shown == ("one, two, ", "stop", "three")
    ids = (await surface.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert answer.usage["completion_tokens"] < len(ids)


@pytest.mark.parametrize("stop", [None, []])
async def test_no_stop_string_is_none(surface: Surface, stop: Any) -> None:
    assert (await surface.everywhere(**forced("beta", stop=stop))).shown == ("beta", "stop", None)


@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
async def test_an_empty_stop_string_is_refused(surface: Surface, stop: Any) -> None:
    assert (await surface.refused(C, {"prompt": "x", "stop": stop}))["param"] == "stop"
    assert (await surface.over_nats(prompt="x", stop=stop))["param"] == "stop"  # type: ignore[index]


async def test_half_a_million_stops_are_refused_quickly_with_the_limit(surface: Surface) -> None:
    error = await surface.refused(C, {"prompt": "x", "stop": ["a"] * 500_000}, timeout=5)
    assert "at most 64" in error["message"]
    error = await surface.refused(C, {"prompt": "x", "stop_token_ids": [5] * 500_000}, timeout=5)
    assert "at most 256" in error["message"]


@pytest.mark.parametrize(("include", "text"), [(True, "alpha beta"), (False, "alpha ")])
async def test_a_stop_string_is_included_on_every_path_or_on_none(surface: Surface, include: bool, text: str) -> None:
    answer = await surface.everywhere(**forced("alpha beta gamma", stop="beta", include_stop_str_in_output=include))
    assert answer.text == text


async def test_a_users_stop_does_not_replace_the_models_own_end(surface: Surface) -> None:
    answer = await surface.both(H, **CHAT, max_tokens=200, stop=["ZZZ"], logit_bias={"2": 100})
    assert (answer.finish, answer.stop_reason) == ("stop", None)


async def test_stop_strings_wait_for_min_tokens(surface: Surface) -> None:
    answer = await surface.everywhere(**forced("stop and go and stop here", stop=["stop"], min_tokens=3))
    assert answer.text == "stop and go and "


# ---- UTF-8, tokens, logprobs


async def test_an_emoji_comes_whole(surface: Surface) -> None:
    answer = await surface.everywhere(**forced("😀 ok"))
    assert answer.text == "😀 ok"
    assert all("\ufffd" not in piece for piece in answer.pieces)


async def test_an_unfinished_character_at_the_end_is_not_lost(surface: Surface) -> None:
    body: Any = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    answer = await surface.everywhere(**body, allowed_token_ids=[FROG[0]])
    assert answer.text == "\ufffd" * len(answer.text)
    assert (len(answer.text) >= 1, answer.finish) == (True, "length")


async def test_logprobs_tell_the_real_bytes_of_every_token(surface: Surface) -> None:
    body: Any = {**CHAT, "max_tokens": 16, "structured_outputs": {"choice": ["😀 ok"]}}
    for answer in (
        await surface.whole(H, **body, logprobs=True, top_logprobs=2),
        await surface.streamed(H, **body, logprobs=True, top_logprobs=2),
        await surface.whole(C, prompt="x", max_tokens=16, structured_outputs={"choice": ["😀 ok"]}, logprobs=2),
    ):
        assert b"".join(bytes(entry[2]) for entry in answer.logprobs).decode() == answer.text == "😀 ok"
        assert all(math.isfinite(entry[1]) and entry[1] <= 0 for entry in answer.logprobs)
        assert all(entry[0] for entry in answer.logprobs)


async def test_logprobs_stay_raw_whatever_shapes_the_choice(surface: Surface) -> None:
    body: Any = {"prompt": "The capital of France is", "max_tokens": 4, "seed": 1, "logprobs": 3}
    forced_to = {"structured_outputs": {"choice": [" Paris."]}}
    first = await surface.whole(C, **body, **forced_to)
    for options in ({"temperature": 0.2}, {"temperature": 2, "top_p": 0.01}, {"frequency_penalty": 2}):
        other = await surface.whole(C, **body, **forced_to, **options)
        assert other.logprobs == first.logprobs
        assert "NaN" not in str(other.logprobs)


async def test_token_texts_join_to_the_content(surface: Surface) -> None:
    for answer in (
        await surface.whole(H, **CHAT, max_tokens=24, logprobs=True),
        await surface.streamed(C, prompt="Once", max_tokens=24, temperature=0, logprobs=0),
    ):
        assert "".join(entry[0] for entry in answer.logprobs) == answer.text


async def test_an_evaluation_harness_gets_the_prompts_logprobs(surface: Surface) -> None:
    body: Any = {"prompt": "The capital of France is", "echo": True, "temperature": 0, "logprobs": 1}
    for ask in (surface.whole, surface.streamed):
        one = await ask(C, **body, max_tokens=1)
        assert one.text == "The capital of France is Paris"
        assert len(one.logprobs) == one.usage["prompt_tokens"] + 1
        assert one.logprobs[0][1] is None
        assert all(entry[1] <= 0 for entry in one.logprobs[1:])
        none = await ask(C, **body, max_tokens=0)
        assert (none.text, none.finish, none.usage["completion_tokens"]) == (body["prompt"], "length", 0)
        assert none.logprobs == one.logprobs[:-1]


async def test_an_evaluation_harness_counts_the_end_token_too(surface: Surface) -> None:
    body: Any = {"prompt": "The capital of France is Paris.", "echo": True, "max_tokens": 1, "allowed_token_ids": [2]}
    for ask in (surface.whole, surface.streamed):
        answer = await ask(C, **body, logprobs=1)
        assert (answer.text, answer.finish) == (body["prompt"], "stop")
        assert len(answer.logprobs) == answer.usage["prompt_tokens"] + 1
        assert "".join(entry[0] for entry in answer.logprobs) == answer.text
        assert answer.logprobs[-1][1] < 0


async def test_prompt_logprobs_are_those_of_generating_the_same_tokens(surface: Surface) -> None:
    prompt = "A frog sat by the pond and sang. " * 6
    scored = await surface.whole(C, prompt=prompt, echo=True, max_tokens=0, logprobs=0)
    ids = (await surface.http.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
    assert len(scored.logprobs) == len(ids)
    for place in (1, 15, 16, 17, len(ids) - 1):
        body: Any = {"prompt": ids[:place], "max_tokens": 1, "logprobs": 0, "allowed_token_ids": [ids[place]]}
        answer = await surface.whole(C, **body)
        assert answer.logprobs[0][1] == scored.logprobs[place][1]


async def test_text_and_tokens_are_turned_into_each_other(surface: Surface) -> None:
    tokens = (await surface.http.post("/tokenize", json={"prompt": "Hello 😀"})).json()
    assert tokens["max_model_len"] == 8192
    assert tokens["count"] == len(tokens["tokens"])
    assert (await surface.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"] == "Hello 😀"
    assert (await surface.http.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""
    for wrong in (-1, 49152, 2**63):
        assert (await surface.refused("/detokenize", {"tokens": [wrong]}))["param"] == "tokens"
    await surface.refused("/tokenize", {"messages": []})


async def test_a_prompt_is_cut_to_its_end(surface: Surface) -> None:
    answer = await surface.whole(C, prompt="one two three", truncate_prompt_tokens=1, max_tokens=1, echo=True)
    assert answer.usage["prompt_tokens"] == 1
    assert answer.text.startswith(" three")


async def test_alternatives_are_decoded_alone_and_have_their_bytes(surface: Surface) -> None:
    body = forced("😀 🌶 ok", logprobs=5)
    logprobs = (await surface.http.post(C, json=body)).json()["choices"][0]["logprobs"]
    assert all(text for tokens in logprobs["top_logprobs"] for text in tokens)
    chat = {**CHAT, "max_tokens": 16, "structured_outputs": body["structured_outputs"]}
    answer = (await surface.http.post(H, json={**chat, "logprobs": True, "top_logprobs": 5})).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert all(other["token"] and other["bytes"] for entry in content for other in entry["top_logprobs"])
