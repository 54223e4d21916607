"""Blocks that were evicted come back from host memory: nothing is computed twice, and not a token changes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Deployment, start_deployment
from tests.integration.prometheus_page import Pages

BLOCK_SIZE = 16
NUM_BLOCKS = 40
"""A long prompt and a half."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = start_deployment(
        tmp_path_factory.mktemp("host_tier"),
        f"executor.num_blocks={NUM_BLOCKS}",
        "executor.host_kv_cache_bytes=100000000",
        "telemetry.metrics_port=0",
    )
    yield deployment
    deployment.stop()


def prompt(number: int) -> str:
    return " ".join(f"Toad {number} of pond {i} has {i * number + 1} spots." for i in range(30))


async def ask(deployment: Deployment, text: str) -> dict[str, Any]:
    body = {"model": "smol", "prompt": text, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{deployment.http_url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_prompt_that_was_evicted_is_found_as_a_whole(deployment: Deployment) -> None:
    first = await ask(deployment, prompt(1))
    num_tokens = first["usage"]["prompt_tokens"]
    assert NUM_BLOCKS // 2 < num_tokens // BLOCK_SIZE < NUM_BLOCKS
    assert num_cached(first) == 0
    for number in (2, 3):
        await ask(deployment, prompt(number))
    again = await ask(deployment, prompt(1))
    assert num_cached(again) == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert tokens_of(again) == tokens_of(first)
    pages = await Pages.read(deployment.metrics_urls)
    assert pages.total("prefix_cache_host_hits_total") >= BLOCK_SIZE
    assert 0 < pages.total("kv_cache_host_usage_perc") < 1


async def test_more_than_fits_at_once_gives_everyone_the_tokens_that_they_get_alone(deployment: Deployment) -> None:
    texts = [prompt(number)[:900] for number in range(10, 16)]
    alone = [tokens_of(await ask(deployment, text)) for text in texts]
    together = await asyncio.gather(*(ask(deployment, text) for text in texts * 2))
    assert [tokens_of(answer) for answer in together] == alone * 2
