"""What the pipeline costs, without a model: the echo engine pretends that each step takes a while.

    python tests/bench/pipeline_overhead.py [--json FILE] [--step-ms 15] [--queued 2000] [--only ttft,streams,queue]

Three measurements, each on a deployment of its own: what comes on top of the engine's own time until the first token of
a single stream; the executor's idle time and the other processes' cores at 16 streams; a step's length with many
requests queued. Figures are of this machine as it is: run it on an idle one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from own_deployment import Running, running

from schemas.generation import Accepted, GenerateRequest
from services.bench.client import Client, RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import Load, run_load
from services.bench.nats_client import NatsClient
from services.bench.prompts import DatasetChoice, make_prompts
from services.bench.record import RequestRecord
from services.bench.statistics import percentile

MODEL = "smol"
ECHO = ("executor.engine=echo", "model.source=builtin:bytes", "executor.num_blocks=8192")
PROMPT_TOKENS = 120
"""About 90 English words."""
STREAMS = 16
SUBMITTERS = 32
"""Requests that are being accepted at the same time while the queue is filled."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks."""

    step_s: float
    num_queued: int
    num_single: int
    window_s: float
    transport: str


@contextlib.asynccontextmanager
async def client_of(deployment: Running, transport: str) -> AsyncIterator[Client]:
    options = RequestOptions(MODEL)
    if transport == "nats":
        yield NatsClient(deployment.bus, options, accept_timeout_s=10.0)
        return
    client = HttpClient(deployment.http_url, options)
    yield client
    client.close()


def load_of(num_prompts: int, output_len: int, max_concurrency: int, seed: int) -> Load:
    prompts = make_prompts(DatasetChoice("random", num_prompts, PROMPT_TOKENS, output_len, seed=seed))
    return Load(prompts, [0.0] * num_prompts, max_concurrency)


async def added_to_ttft(wish: Wish) -> dict[str, Any]:
    """One stream, an engine that takes no time: what is left is the pipeline, and this client."""
    async with running(ECHO) as deployment, client_of(deployment, wish.transport) as client:
        await run_load(client, load_of(20, 16, 1, seed=1))
        deployment.watch.begin()
        outcome = await run_load(client, load_of(wish.num_single, 16, 1, seed=2))
        deployment.watch.end()
    ttfts_ms = sorted(record.ttft_s * 1e3 for record in _good(outcome.records))
    steps = [step for steps in deployment.watch.steps.values() for step in steps]
    engine_ms = statistics.mean(step.duration_s for step in steps) * 1e3
    return {
        "ttft_p50_ms": percentile(ttfts_ms, 50),
        "ttft_p99_ms": percentile(ttfts_ms, 99),
        "engine_step_ms": engine_ms,
        "added_p50_ms": percentile(ttfts_ms, 50) - engine_ms,
    }


async def at_many_streams(wish: Wish) -> dict[str, Any]:
    """Idle time of the executor and cores of the rest, while 16 streams run."""
    settings, output_len = [*ECHO, f"executor.step_time_s={wish.step_s}"], int(wish.window_s / wish.step_s)
    async with running(settings) as deployment, client_of(deployment, wish.transport) as client:
        await run_load(client, load_of(STREAMS, 16, STREAMS, seed=1))
        deployment.watch.begin()
        outcome = await run_load(client, load_of(STREAMS * 2, output_len, STREAMS, seed=2))
        deployment.watch.end()
    cores = {name: cpu_s / outcome.duration_s for name, cpu_s in deployment.watch.cpu_s.items()}
    (executor,) = deployment.watch.executors(_good(outcome.records)).values()
    tokens = sum(record.num_output_tokens for record in outcome.records)
    return {
        "median_step_ms": executor.median_step_ms,
        "idle_share": executor.idle_share,
        "outside_engine_share": 1 - executor.engine_share,
        "output_tokens_per_s": tokens / outcome.duration_s,
        "cores": cores,
        "cores_without_executor": sum(share for name, share in cores.items() if not name.startswith("executor")),
        "client_cores": outcome.client_cpu_s / outcome.duration_s,
    }


async def with_a_queue(wish: Wish) -> dict[str, Any]:
    """The same running streams, before and after many more requests have been accepted behind them."""
    settings = [*ECHO, f"executor.step_time_s={wish.step_s}", f"scheduler.max_num_seqs={STREAMS}"]
    async with running(settings) as deployment, client_of(deployment, "nats") as client:
        output_len = int((2 * wish.window_s + wish.num_queued / 50) / wish.step_s)
        streams = asyncio.create_task(run_load(client, load_of(STREAMS, output_len, STREAMS, seed=1)))
        await asyncio.sleep(1.5)
        before = await _window(deployment, wish.window_s)
        began_s = perf_counter()
        await _fill_queue(deployment, wish.num_queued)
        filling_s = perf_counter() - began_s
        during = _steps_since(deployment, began_s)
        await asyncio.sleep(0.5)
        after = await _window(deployment, wish.window_s)
        still_running = not streams.done()
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
    return {
        "num_queued": wish.num_queued,
        "streams_ran_throughout": still_running,
        "filling_s": filling_s,
        "without_queue": before,
        "while_filling": during,
        "with_queue": after,
        "slow_down": after["step_period_ms"] / before["step_period_ms"] - 1,
    }


async def _fill_queue(deployment: Running, num_requests: int) -> None:
    """Have requests accepted whose answers nobody follows."""
    prompts = iter(make_prompts(DatasetChoice("random", num_requests, PROMPT_TOKENS, 64, seed=3)))
    subject = deployment.bus.subjects.generate(MODEL)

    async def submit() -> None:
        for prompt in prompts:
            request = GenerateRequest(prompt=prompt.content, max_tokens=64, ignore_eos=True, deliver="log")
            await deployment.bus.request(subject, request, Accepted, timeout_s=30.0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SUBMITTERS):
            tasks.create_task(submit())


async def _window(deployment: Running, window_s: float) -> dict[str, float]:
    began_s = perf_counter()
    deployment.watch.begin()
    await asyncio.sleep(window_s)
    deployment.watch.end()
    others_s = sum(cpu_s for name, cpu_s in deployment.watch.cpu_s.items() if not name.startswith("executor"))
    return _steps_since(deployment, began_s) | {"cores_without_executor": others_s / window_s}


def _steps_since(deployment: Running, began_s: float) -> dict[str, float]:
    (steps,) = deployment.watch.steps.values()
    seen = [step for step in steps if step.arrived_s >= began_s]
    whole_s = seen[-1].arrived_s - seen[0].arrived_s
    return {
        "step_period_ms": whole_s / (len(seen) - 1) * 1e3,
        "engine_step_ms": statistics.mean(step.duration_s for step in seen) * 1e3,
        "idle_share": sum(step.idle_s for step in seen[1:]) / whole_s,
    }


def _good(records: list[RequestRecord]) -> list[RequestRecord]:
    failed = {record.error for record in records if not record.is_success}
    if failed:
        raise SystemExit(f"requests failed: {failed}")
    return records


MEASUREMENTS: dict[str, Callable[[Wish], Coroutine[Any, Any, dict[str, Any]]]] = {
    "ttft": added_to_ttft,
    "streams": at_many_streams,
    "queue": with_a_queue,
}


def show(name: str, figures: dict[str, Any]) -> None:
    print(f"\n{name}")
    for key, value in figures.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{word} {number:.3f}" for word, number in value.items())
            print(f"  {key:26}{inner}")
        else:
            print(f"  {key:26}{f'{value:.3f}' if isinstance(value, float) else value}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what the pipeline costs, measured with the echo engine")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="measurements, by comma")
    parser.add_argument("--transport", choices=["http", "nats"], default="http")
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--queued", type=int, default=2000)
    parser.add_argument("--single", type=int, default=200, help="requests of the single stream")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of each window")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wish = Wish(options.step_ms / 1e3, options.queued, options.single, options.window, options.transport)
    load = os.getloadavg()[0]
    print(f"{platform.node()}, {os.cpu_count()} cores, load average {load:.1f} at the start")
    results: dict[str, Any] = {"load_average": load}
    for name in options.only.split(","):
        results[name] = asyncio.run(MEASUREMENTS[name](wish))
        show(name, results[name])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
