"""Acceptance: finish reasons, usage, the shape of answers and streams, cancelling, resuming, determinism."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.acceptance import C, H, Surface, folded, surface_of
from tests.integration.conftest import Deployment, start_deployment

CHAT: Any = {"messages": [{"role": "user", "content": "Name three colours."}]}
STORY: Any = {"prompt": "Once upon a time there was", "temperature": 0, "max_tokens": 24}


@pytest.fixture
async def surface(deployment: Deployment) -> AsyncIterator[Surface]:
    async with surface_of(deployment) as surface:
        yield surface


# ---- finish, usage, shape


async def test_a_natural_end_and_a_length_are_told_apart(surface: Surface) -> None:
    assert (await surface.both(H, **CHAT, temperature=0, max_tokens=2)).finish == "length"
    assert (await surface.both(H, **CHAT, temperature=0, max_tokens=9, logit_bias={"2": 100})).finish == "stop"


async def test_a_streams_chunks_have_one_id_one_role_and_one_finish(surface: Surface) -> None:
    events = await surface.events(H, **CHAT, temperature=0, max_tokens=6, stream_options={"include_usage": True})
    roles = [choice["delta"].get("role") for event in events for choice in event["choices"]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert folded(events).usage["completion_tokens"] == 6


async def test_continuous_usage_rises_to_the_value_of_the_whole_answer(surface: Surface) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await surface.events(C, **STORY, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == (await surface.whole(C, **STORY)).usage["completion_tokens"]


async def test_four_choices_are_four_each_time(surface: Surface) -> None:
    body: Any = {**CHAT, "n": 4, "temperature": 1, "seed": 3, "max_tokens": 6}
    for _ in range(2):
        choices = (await surface.http.post(H, json=body)).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


async def test_streamed_choices_finish_once_each(surface: Surface) -> None:
    events = await surface.events(H, **CHAT, n=2, temperature=1, seed=3, max_tokens=6)
    assert all(len(event["choices"]) == 1 for event in events)
    choices = [event["choices"][0] for event in events]
    finishes = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(finishes) == [0, 1]
    whole = (await surface.http.post(H, json={**CHAT, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 6})).json()
    for index in (0, 1):
        text = "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)
        assert text == whole["choices"][index]["message"]["content"]


async def test_an_error_in_mid_stream_is_an_error_object_and_then_done(surface: Surface) -> None:
    events = await surface.events(C, **{**STORY, "max_tokens": 4000}, ignore_eos=True, timeout_s=0.5)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert all("error" not in event for event in events[:-1])


async def test_usage_counts_the_cached_prefix_but_never_the_whole_prompt(surface: Surface) -> None:
    prompt = [1000 + number for number in range(64)]
    cached = []
    for _ in range(3):
        answer = await surface.whole(C, prompt=prompt, temperature=0, max_tokens=1)
        cached.append(answer.usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[1:] == [48, 48]


async def test_a_growing_conversation_finds_exactly_its_full_blocks(surface: Surface) -> None:
    """Blocks of 16; the last token of an answer was never run, so it is in no block."""
    ids, num_run = [9000 + number for number in range(37)], 0
    for _ in range(5):
        body = {"prompt": ids, "temperature": 0, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
        answer = (await surface.http.post(C, json=body)).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == min(num_run // 16, (len(ids) - 1) // 16) * 16
        ids = ids + answer["choices"][0]["token_ids"]
        num_run = len(ids) - 1
        ids = ids + [500, 501, 502, 503, 504]


# ---- determinism


async def test_tokens_and_logprobs_do_not_depend_on_company_or_cache(surface: Surface) -> None:
    prompt = [2000 + 7 * number % 4000 for number in range(300)]
    body: Any = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "logprobs": 2}
    alone = [await surface.whole(C, **body) for _ in range(3)]
    noise = [surface.whole(C, prompt=f"Number {number}", max_tokens=24, ignore_eos=True) for number in range(8)]
    among, *_ = await asyncio.gather(surface.whole(C, **body), *noise)
    for answer in (*alone, among):
        assert (answer.text, answer.logprobs) == (alone[0].text, alone[0].logprobs)


async def test_forty_prompts_are_answered_alike_cold_and_warm(surface: Surface) -> None:
    for number in range(40):
        prompt = [4000 + (number * 97 + 13 * place) % 9000 for place in range(18 + 2 * number)]
        body: Any = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "logprobs": 1}
        cold, warm = await surface.whole(C, **body), await surface.whole(C, **body)
        assert warm.usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert (warm.text, warm.logprobs) == (cold.text, cold.logprobs)


async def test_a_seed_draws_the_same_tokens_alone_and_under_load(surface: Surface) -> None:
    body: Any = {"prompt": "A poem:", "temperature": 1, "seed": 42, "max_tokens": 16}
    alone = await surface.everywhere(**body)
    others = [surface.whole(C, prompt=f"Number {number}", max_tokens=16, ignore_eos=True) for number in range(8)]
    among, *_ = await asyncio.gather(surface.whole(C, **body), *others)
    assert among.text == alone.text


# ---- cancelling, resuming, repeating


async def num_aborted(surface: Surface) -> float:
    page = (await surface.http.get("/metrics")).text
    aborts = [line for line in page.splitlines() if "request_success_total" in line and "abort" in line]
    return sum(float(line.split()[-1]) for line in aborts)


async def test_a_client_that_leaves_is_noticed_streaming_or_not(surface: Surface) -> None:
    before = await num_aborted(surface)
    body: Any = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    async with surface.http.stream("POST", C, json={**body, "stream": True}) as response:
        lines = response.aiter_lines()
        for _ in range(6):
            await anext(lines)
    with pytest.raises(httpx.ReadTimeout):
        await surface.http.post(C, json=body, timeout=0.5)
    async with asyncio.timeout(10):
        while await num_aborted(surface) < before + 2:
            await asyncio.sleep(0.1)


async def test_a_stream_can_be_read_on_from_the_last_event_seen(surface: Surface) -> None:
    ids, parts = [], []
    async with surface.http.stream("POST", C, json={**STORY, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
            elif line.startswith("data: {"):
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    place = len(ids) // 2
    rest = await surface.events(C, headers={"Last-Event-ID": ids[place]}, **STORY)
    assert [event["choices"][0]["text"] for event in rest] == parts[place + 1 :]
    headers = {"Last-Event-ID": "nobody/3"}
    unknown = await surface.http.post(C, json={**STORY, "stream": True}, headers=headers)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "output_not_found")


async def test_a_request_sent_twice_with_one_key_is_answered_once(surface: Surface) -> None:
    body: Any = {"prompt": "A random number:", "max_tokens": 12, "temperature": 2}
    headers = {"Idempotency-Key": "order-17"}
    first, again = [(await surface.http.post(C, json=body, headers=headers)).json() for _ in range(2)]
    assert first == again
    other = (await surface.http.post(C, json={**body, "max_tokens": 11}, headers=headers)).json()
    assert other["id"] != first["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_belongs_to_one_request(surface: Surface, stream: bool) -> None:
    body: Any = {"prompt": "A random number:", "max_tokens": 8, "temperature": 2, "request_id": f"one-{stream}"}
    first, again = [await surface.whole(C, **body) for _ in range(2)]
    assert first.shown == again.shown
    assert (await surface.streamed(C, **body)).shown == first.shown
    for change in ({"n": 2}, {"prompt": "Another:"}):
        refused = await surface.http.post(C, json={**body, **change, "stream": stream})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_parameter", "request_id")
    assert (await surface.whole(C, **body)).shown == first.shown


# ---- keys and limits, on deployments of their own


async def test_keys_are_needed_where_they_are_configured(start_echo: Callable[..., Deployment], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    deployment = start_echo(f"gateway.api_keys_file={keys}", "gateway.max_body_bytes=65536")
    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=30) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = await http.post(C, json=STORY, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.get("/health")).status_code == 200
        known = {"authorization": "Bearer sesame"}
        assert (await http.post(C, json=STORY, headers=known)).status_code == 200
        large = await http.post(C, content=b"x" * 100_000, headers={**known, "content-type": "application/json"})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")
        keys.write_text("open\n")
        assert (await http.post(C, json=STORY, headers=known)).status_code == 401
        assert (await http.post(C, json=STORY, headers={"authorization": "Bearer open"})).status_code == 200
    assert "sesame" not in deployment.log()


async def test_a_full_queue_refuses_at_once_and_priority_jumps_it(tmp_path: Path) -> None:
    echo = ("executor.engine=echo", "model.source=builtin:bytes", "executor.step_time_s=0.02")
    limits = ("executor.num_blocks=256", "scheduler.max_num_seqs=1", "bus.work_max_msgs=4")
    deployment = start_deployment(tmp_path, *echo, *limits, "tokenizer.structured_output=false")
    try:
        async with httpx.AsyncClient(base_url=deployment.http_url, timeout=60) as http:
            body: Any = {"prompt": "abc", "max_tokens": 10}
            responses = await asyncio.gather(*(http.post(C, json=body) for _ in range(20)))
            statuses = [response.status_code for response in responses]
            assert set(statuses) == {200, 503}
            refused = next(response for response in responses if response.status_code == 503)
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            done: list[str] = []

            async def ask(name: str, **fields: Any) -> None:
                assert (await http.post(C, json={**body, **fields})).status_code == 200
                done.append(name)

            async with asyncio.TaskGroup() as group:
                for name, num_tokens in (("running", 150), ("waiting", 10), ("low", 10)):
                    group.create_task(ask(name, priority="low", max_tokens=num_tokens))
                    await asyncio.sleep(0.1)
                group.create_task(ask("high", priority="high"))
            assert done.index("high") < done.index("low")
            off = await http.post(C, json={**body, "structured_outputs": {"regex": "a"}})
            assert (off.status_code, off.json()["error"]["param"]) == (400, "structured_outputs")
    finally:
        deployment.stop()
