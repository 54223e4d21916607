"""One request is one trace, whatever becomes of it: complete at a real receiver, none orphaned, durations true."""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.conftest import NATTERJACK, Deployment
from tests.integration.otlp_receiver import Receiver, attribute, seconds

PARENT_ID = "b7ad6b7169203331"
WANTED = {
    "natterjack-gateway": {"POST /v1/completions", "request generate_request"},
    "natterjack-tokenizer": {
        "process generate_request",
        "tokenizer.encode",
        "publish work_item",
        "tokenizer.detokenize",
    },
    "natterjack-scheduler": {"scheduler.queue", "scheduler.admit"},
    "natterjack-cache_manager": {"cache_manager.acquire"},
    "natterjack-executor": {"executor.prefill", "executor.decode"},
}
NUM_UNDISTURBED, NUM_DISTURBED = 40, 10
MAX_TOKENS = 60
STEP_S = 0.015
PARTS = ("process generate_request", "scheduler.queue", "scheduler.admit", "executor.prefill", "executor.decode")
"""What a request passes one after the other, as far as the engine's last token."""


@dataclass
class Sent:
    """One request of the test: its trace, what was asked, and how long its client waited for what."""

    number: int
    kind: str
    status: int = 0
    took_s: float = 0.0
    text: str = ""

    @property
    def trace_id(self) -> str:
        return f"{self.number + 1:032x}"

    @property
    def body(self) -> dict[str, Any]:
        body = {
            "model": "smol",
            "prompt": f"request number {self.number} " * 4,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.kind in ("stream", "cancel"),
        }
        if self.kind == "n":
            body |= {"n": 2, "temperature": 1}
        if self.kind == "error":
            body |= {"temperature": 9}
        return body


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


async def send(client: httpx.AsyncClient, sent: Sent) -> Sent:
    headers = {"traceparent": f"00-{sent.trace_id}-{PARENT_ID}-01"}
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=sent.body, headers=headers) as response:
        sent.status = response.status_code
        async for line in response.aiter_lines():
            sent.text += line
            if sent.kind == "cancel" and line:
                break
    sent.took_s = time.perf_counter() - started
    return sent


def executor_pid(deployment: Deployment) -> int:
    command = [*NATTERJACK, "status", "--json", *deployment.settings()]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return next(int(i["pid"]) for i in found["services"] if i["role"] == "executor")


async def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)
    assert condition(), what()


async def limited(calls: list[Awaitable[Sent]], width: int) -> list[Sent]:
    gate = asyncio.Semaphore(width)

    async def one(call: Awaitable[Sent]) -> Sent:
        async with gate:
            return await call

    return await asyncio.gather(*map(one, calls))


async def test_fifty_mixed_requests_are_fifty_complete_traces(
    receiver: Receiver, start_echo: Callable[..., Deployment]
) -> None:
    deployment = start_echo(
        f"telemetry.otlp_endpoint={receiver.url}", f"executor.step_time_s={STEP_S}", "executor.num_blocks=32"
    )
    kinds = ("whole", "stream", "n", "cancel", "error")
    undisturbed = [Sent(number, kinds[number % len(kinds)]) for number in range(NUM_UNDISTURBED)]
    disturbed = [Sent(NUM_UNDISTURBED + number, "stream") for number in range(NUM_DISTURBED)]
    calm = [sent for sent in undisturbed if sent.kind not in ("error", "cancel")]
    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=60) as client:
        await limited([send(client, sent) for sent in undisturbed], 4)
        await complete(receiver, calm)  # a killed process takes along what it has yet to export
        victim = executor_pid(deployment)
        running = asyncio.gather(*(send(client, sent) for sent in disturbed))
        await until(lambda: any(sent.text for sent in disturbed), lambda: disturbed)
        killed_ns = time.time_ns()
        os.kill(victim, signal.SIGKILL)
        await running
    await complete(receiver, disturbed, killed_ns)
    for sent in (*undisturbed, *disturbed):
        assert sent.status == (400 if sent.kind == "error" else 200), sent
    for sent in disturbed:
        assert sent.text.endswith("data: [DONE]"), sent

    for sent in (*undisturbed, *disturbed):
        check_root(receiver, sent)
    check_executions(receiver, calm, disturbed)
    check_durations(receiver, calm)
    ended_elsewhere = [sent for sent in disturbed if not missing(receiver, sent, killed_ns=0)]
    check_steps(receiver, {sent.trace_id for sent in (*calm, *ended_elsewhere)})


async def complete(receiver: Receiver, requests: list[Sent], killed_ns: int = 0) -> None:
    """Wait until every trace has all its spans, and no span without its parent.

    An executor that was killed took along what it had yet to export: spans of requests that had ended there.
    """

    def gaps() -> dict[int, object]:
        found = {sent.number: (missing(receiver, sent, killed_ns), orphans(receiver, sent)) for sent in requests}
        return {number: gap for number, gap in found.items() if any(gap)}

    await until(lambda: not gaps(), gaps)


def missing(receiver: Receiver, sent: Sent, killed_ns: int) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}
    admitted_ns = 0
    for service, span in receiver.trace(sent.trace_id):
        seen.setdefault(service, set()).add(span.name)
        if span.name == "scheduler.admit":
            admitted_ns = max(admitted_ns, span.end_time_unix_nano)
    found = {service: gap for service, names in WANTED.items() if (gap := names - seen.get(service, set()))}
    if 0 < admitted_ns < killed_ns:
        found.pop("natterjack-executor", None)
    return found


def orphans(receiver: Receiver, sent: Sent) -> list[str]:
    trace = receiver.trace(sent.trace_id)
    ids = {span.span_id.hex() for _, span in trace} | {PARENT_ID}
    return [span.name for _, span in trace if span.parent_span_id.hex() not in ids]


def check_root(receiver: Receiver, sent: Sent) -> None:
    """One span, the gateway's, is the child of the client's own, and says how the request ended."""
    (root,) = [span for _, span in receiver.trace(sent.trace_id) if span.parent_span_id.hex() == PARENT_ID]
    assert root.name == "POST /v1/completions"
    assert root.kind == root.SPAN_KIND_SERVER
    assert attribute(root, "http.response.status_code") == (499 if sent.kind == "cancel" else sent.status)
    assert attribute(root, "gen_ai.operation.name") == "text_completion"
    if sent.status == 200:
        assert attribute(root, "gen_ai.request.model") == "smol"
        assert attribute(root, "gen_ai.request.max_tokens") == MAX_TOKENS
    if sent.status == 200 and sent.kind != "cancel":
        assert attribute(root, "gen_ai.usage.output_tokens") == MAX_TOKENS * (2 if sent.kind == "n" else 1)
    if sent.kind == "error":
        assert not any(service == "natterjack-executor" for service, _ in receiver.trace(sent.trace_id))


def check_executions(receiver: Receiver, undisturbed: list[Sent], disturbed: list[Sent]) -> None:
    """A preempted or a moved sequence runs twice, within the same trace, and its second wait tells why."""

    def num_prefills(sent: Sent) -> int:
        return sum(span.name == "executor.prefill" for _, span in receiver.trace(sent.trace_id))

    assert sum(num_prefills(sent) for sent in undisturbed) > sum(2 if sent.kind == "n" else 1 for sent in undisturbed)
    admissions = [
        sum(span.name == "scheduler.queue" for _, span in receiver.trace(sent.trace_id)) for sent in disturbed
    ]
    assert max(admissions) > 1, "the death of the executor left no trace"

    def setbacks(requests: list[Sent]) -> set[str]:
        spans = [span for sent in requests for _, span in receiver.trace(sent.trace_id)]
        return {event.name for span in spans if span.name == "scheduler.queue" for event in span.events}

    assert "natterjack.preempted" in setbacks(undisturbed)
    assert "natterjack.executor_lost" in setbacks(disturbed)


def check_durations(receiver: Receiver, sent: list[Sent]) -> None:
    """The parts add up to what each client saw, choices and preempted sequences included.

    A part is a span of its own clock, and the parts of a request follow each other: so what they add up to is the time
    that any of them covers. By the median within 5 %, for a busy machine delays single clients.
    """
    shares, sums = [], []
    for one in sent:
        trace = receiver.trace(one.trace_id)
        (root,) = [span for _, span in trace if span.name == "POST /v1/completions"]
        shares.append(seconds(root) / one.took_s)
        sums.append(covered_s([span for _, span in trace if span.name in PARTS]) / one.took_s)
        executions = [span for _, span in trace if span.name in ("executor.prefill", "executor.decode")]
        last_ns = max(span.end_time_unix_nano for _, span in trace if span.name == "tokenizer.detokenize")
        assert last_ns >= max(span.end_time_unix_nano for span in executions) - 50e6
    assert 0.95 <= statistics.median(shares) <= 1.02, shares
    assert 0.95 <= statistics.median(sums) <= 1.02, sums


def covered_s(spans: list[Span]) -> float:
    """Return how long at least one of the spans ran."""
    total_ns = end_ns = 0
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        total_ns += max(0, span.end_time_unix_nano - max(span.start_time_unix_nano, end_ns))
        end_ns = max(end_ns, span.end_time_unix_nano)
    return total_ns / 1e9


def check_steps(receiver: Receiver, trace_ids: set[str]) -> None:
    """Steps are traces of their own, linked with the requests that they served, in both directions."""
    steps = {span.span_id.hex(): span for _, span in receiver.spans if span.name == "executor.step"}
    assert steps
    assert not any(span.parent_span_id for span in steps.values())
    linked = {link.trace_id.hex() for span in steps.values() for link in span.links}
    assert trace_ids <= linked
    named = [
        link.span_id.hex()
        for trace_id in trace_ids
        for _, span in receiver.trace(trace_id)
        if span.name == "executor.decode"
        for link in span.links
    ]
    assert named
    assert set(named) <= steps.keys()


async def test_an_unchosen_trace_is_exported_when_its_request_fails(
    receiver: Receiver, start_echo: Callable[..., Deployment]
) -> None:
    deployment = start_echo(
        f"telemetry.otlp_endpoint={receiver.url}",
        "telemetry.trace_share=0",
        "executor.step_time_s=0.02",
        "telemetry.otlp_metrics_period_s=0",
    )
    late = Sent(1, "whole")
    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=30) as client:
        fine = await client.post("/v1/completions", json=Sent(0, "whole").body)
        failed = await client.post("/v1/completions", json={**late.body, "timeout_s": 0.4})
    assert (fine.status_code, failed.status_code) == (200, 504)
    await until(lambda: {s for s, _ in receiver.spans} >= WANTED.keys(), lambda: receiver.spans)
    assert len({span.trace_id for _, span in receiver.spans if span.name != "executor.step"}) == 1
