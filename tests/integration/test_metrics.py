"""Counters and histograms of a whole deployment against what its clients measured; gauges after a storm of aborts."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator

import httpx
import nats
import pytest

from services.runtime.stream_watch import PERIOD_S
from tests.integration.conftest import ECHO, Deployment, start_deployment
from tests.integration.prometheus_page import Pages

NUM_REQUESTS = 500
CONCURRENCY = 16
NUM_ABORTS = 60
GAUGES = (
    "num_requests_open",
    "num_requests_running",
    "num_requests_waiting",
    "num_steps_in_flight",
    "num_outputs_open",
    "num_sequences_held",
    "kv_cache_usage_perc",
    "oldest_request_age_seconds",
)


@pytest.fixture(scope="module", params=["echo", pytest.param("real model", marks=pytest.mark.slow)])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """An echo engine at the pace of a small model, or the default model."""
    options = ["telemetry.metrics_port=0"]
    if request.param == "echo":
        options += [*ECHO, "executor.step_time_s=0.004"]
    deployment = start_deployment(tmp_path_factory.mktemp("metered"), *options)
    yield deployment
    deployment.stop()


@pytest.fixture(scope="module")
def urls(deployment: Deployment) -> list[str]:
    """Where each service serves its metrics."""
    found = re.findall(r"\[(\S+)\] .*serving probes and metrics on (http://\S+)", deployment.log())
    assert sorted(name for name, _ in found) == [
        "cache_manager-0",
        "executor-0",
        "gateway-0",
        "scheduler-0",
        "tokenizer-0",
    ]
    return [url for _, url in found]


class Seen:
    """What the clients measured."""

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0
        self.first_token_s: list[float] = []
        self.whole_s: list[float] = []
        self.finished: dict[str, int] = {}

    def end(self, usage: dict[str, int], reason: str, started_s: float) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.whole_s.append(time.perf_counter() - started_s)


async def one(client: httpx.AsyncClient, number: int, seen: Seen) -> None:
    body = {"model": "smol", "prompt": "word " * (number % 7 + 1), "max_tokens": number % 40 + 2, "ignore_eos": True}
    started_s = time.perf_counter()
    if number % 2:
        answer = (await client.post("/v1/completions", json=body)).json()
        seen.end(answer["usage"], answer["choices"][0]["finish_reason"], started_s)
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reason, is_first, usage = "", True, {}
    async with client.stream("POST", "/v1/completions", json=body | options) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if is_first:
                seen.first_token_s.append(time.perf_counter() - started_s)
                is_first = False
            usage = chunk.get("usage") or usage
            reason = next((c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]), reason)
    seen.end(usage, reason, started_s)


async def traffic(client: httpx.AsyncClient, num_requests: int) -> Seen:
    seen, gate = Seen(), asyncio.Semaphore(CONCURRENCY)

    async def limited(number: int) -> None:
        async with gate:
            await one(client, number, seen)

    await asyncio.gather(*(limited(number) for number in range(num_requests)))
    return seen


CLIENT_DELAY_S = 2.0
"""A client sees everything later than the gateway: it shares its cores with the deployment and with other tests."""


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


async def test_counts_equal_what_clients_measured_and_percentiles_lie_in_their_bucket(
    deployment: Deployment, urls: list[str]
) -> None:
    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=60) as client:
        await traffic(client, 2 * CONCURRENCY)  # opens the connections
        before = await Pages.read(urls)
        seen = await traffic(client, NUM_REQUESTS)
        refused = await client.post(
            "/v1/completions", json={"model": "smol", "prompt": "word " * 9000, "max_tokens": 9}
        )
    assert refused.status_code == 400
    after = await Pages.read(urls)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - (before.total(name, **labels) if before.of(name, **labels) else 0)

    assert grown("prompt_tokens_total") == seen.prompt_tokens
    assert grown("generation_tokens_total") == seen.completion_tokens
    assert grown("output_appended_tokens_total") == seen.completion_tokens
    assert {r: grown("request_success_total", finished_reason=r) for r in seen.finished} == seen.finished
    assert grown("request_success_total") == NUM_REQUESTS
    assert grown("requests_accepted_total") == NUM_REQUESTS
    assert grown("request_queue_time_seconds_count") == NUM_REQUESTS
    assert grown("request_prefill_time_seconds_count") == NUM_REQUESTS
    assert grown("request_errors_total", code="context_length_exceeded") == 1
    assert grown("admission_rejections_total", reason="context_length_exceeded") == 1
    assert grown("http_requests_total", route="/v1/completions", status="200") == NUM_REQUESTS
    assert grown("http_requests_total", route="/v1/completions", status="400") == 1
    assert grown("request_generation_tokens_sum") == seen.completion_tokens
    num_gaps = seen.completion_tokens - NUM_REQUESTS
    assert 0.8 * num_gaps <= grown("inter_token_latency_seconds_count") <= num_gaps  # first tokens may come in pairs
    for name, measured in (
        ("e2e_request_latency_seconds", seen.whole_s),
        ("time_to_first_token_seconds", seen.first_token_s),
    ):
        low, high = after.bucket(name, 0.5, before)
        assert low <= quantile(measured, 0.5) <= high + CLIENT_DELAY_S


async def test_a_nats_clients_requests_are_counted_as_well(deployment: Deployment, urls: list[str]) -> None:
    before = await Pages.read(urls)
    async with await nats.connect(deployment.nats_url) as client:
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
        await client.publish("nj.v1.generate.smol", json.dumps(body).encode(), reply=inbox)
        while not (chunk := json.loads((await replies.next_msg(timeout=10)).data)).get("final"):
            pass
    after = await Pages.read(urls)
    num_prompt_tokens = chunk["usage"]["prompt_tokens"]
    assert num_prompt_tokens > 0
    amounts = {"generation_tokens_total": 5, "request_success_total": 1, "prompt_tokens_total": num_prompt_tokens}
    for name, amount in amounts.items():
        assert after.total(name) - before.total(name) == amount


async def test_every_gauge_is_zero_after_a_storm_of_aborts(deployment: Deployment, urls: list[str]) -> None:
    before = await Pages.read(urls)
    body = {"model": "smol", "prompt": "endless", "max_tokens": 3000, "ignore_eos": True, "stream": True}

    async def leave_early(client: httpx.AsyncClient, number: int) -> None:
        if number % 3:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return
        try:  # queued or running, and not even streamed
            await client.post("/v1/completions", json=body | {"stream": False}, timeout=1.5)
        except httpx.TimeoutException:
            return

    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=60) as client:
        await asyncio.gather(*(leave_early(client, number) for number in range(NUM_ABORTS)))
    deadline = time.monotonic() + 10
    while True:
        pages = await Pages.read(urls)
        left = {name: pages.total(name) for name in GAUGES if pages.total(name)}
        if not left:
            break
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)
    aborted = pages.total("request_success_total", finished_reason="abort")
    assert aborted - before.total("request_success_total", finished_reason="abort") == NUM_ABORTS
    assert pages.total("time_to_abort_seconds_count") > 0
    assert pages.bucket("time_to_abort_seconds", 0.9)[0] < 1.0


async def test_every_service_answers_probes_and_measures_the_bus(urls: list[str]) -> None:
    async with httpx.AsyncClient() as client:
        for url in urls:
            assert (await client.get(f"{url}/health")).status_code == 200
            assert (await client.get(f"{url}/ready")).text == "ready\n"
    pages = await Pages.read(urls)
    assert {s.labels["role"] for s in pages.of("build_info")} == {
        "gateway",
        "tokenizer",
        "scheduler",
        "cache_manager",
        "executor",
    }
    assert pages.total("bus_connected") == 5
    for message in ("generate_request", "step_plan", "step_result", "token_batch", "cache_command"):
        assert pages.total("bus_hop_seconds_count", subject=message) > 0
    assert pages.bucket("bus_hop_seconds", 0.5)[0] < 0.1
    assert {s.labels["stream"] for s in pages.of("stream_messages")} == {"work", "out"}
    deadline = time.monotonic() + 2 * PERIOD_S
    while not pages.total("stream_bytes", stream="out"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
        pages = await Pages.read(urls)
    assert 0 < pages.total("stream_full_perc", stream="out") < 0.1
