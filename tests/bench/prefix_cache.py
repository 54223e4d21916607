"""What the prefix cache is worth with the real model: the same load with and without it, in one deployment.

    python tests/bench/prefix_cache.py [--streams 8] [--requests 24] [--words 800] [--json FILE]

Without means `skip_reading_prefix_cache`: everything is computed, as if nothing was there. First, streams whose prompts
share a prefix; then conversations that are asked again, as the next turn of a chat does. At last conversations that do
not fit into a small KV pool together, so that each was evicted when it goes on, with host memory for them and without.
Compare within one run only.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

from own_deployment import Running, running

from services.bench.client import RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import Load, Outcome, run_load
from services.bench.prompts import Prompt
from services.bench.record import RequestRecord
from services.bench.sentences import natural_prompt

MODEL = "smol"
OWN_WORDS = 20
NUM_CONVERSATIONS = 6
SMALL_POOL = "executor.num_blocks=192"
HOST_MEMORY = "executor.host_kv_cache_bytes=400000000"
SKIPPING = {"skip_reading_prefix_cache": True}


def shared(num_requests: int, num_words: int, output_len: int) -> list[Prompt]:
    """Prompts that have all but their last words in common."""
    rng = random.Random(1)
    prefix = natural_prompt(rng, num_words)
    return [Prompt(f"{prefix} {natural_prompt(rng, OWN_WORDS)}", output_len) for _ in range(num_requests)]


async def ask(deployment: Running, prompts: list[Prompt], streams: int, extra: dict[str, Any]) -> Outcome:
    client = HttpClient(deployment.http_url, RequestOptions(MODEL, extra=extra))
    try:
        outcome = await run_load(client, Load(prompts, [0.0] * len(prompts), streams))
    finally:
        client.close()
    if failed := {record.error for record in outcome.records if not record.is_success}:
        raise SystemExit(f"requests failed: {failed}")
    return outcome


def total_tokens_per_s(outcome: Outcome) -> float:
    return sum(r.num_prompt_tokens + r.num_output_tokens for r in outcome.records) / outcome.duration_s


async def at_streams(deployment: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Prompt and output tokens a second, of all streams together."""
    prompts = shared(options.requests, options.words, options.output)
    without = await ask(deployment, prompts, options.streams, SKIPPING)
    cached = await ask(deployment, prompts, options.streams, {"cache_salt": "new"})
    return {
        "prompt_tokens": cached.records[0].num_prompt_tokens,
        "cached_share": sum(r.num_cached_tokens for r in cached.records)
        / sum(r.num_prompt_tokens for r in cached.records),
        "total_tokens_per_s_without": total_tokens_per_s(without),
        "total_tokens_per_s": total_tokens_per_s(cached),
        "ratio": total_tokens_per_s(cached) / total_tokens_per_s(without),
    }


async def turn(deployment: Running, said: list[dict[str, str]]) -> RequestRecord:
    """Answer a conversation, alone."""
    return (await ask(deployment, [Prompt("", 16, tuple(said))], 1, {})).records[0]


def conversations(num_words: int) -> list[list[dict[str, str]]]:
    """What is said first in each."""
    rng = random.Random(2)
    return [[{"role": "user", "content": natural_prompt(rng, num_words)}] for _ in range(NUM_CONVERSATIONS)]


def next_turn(said: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*said, {"role": "assistant", "content": "I see."}, {"role": "user", "content": "Go on, please."}]


def compared(first: list[RequestRecord], second: list[RequestRecord]) -> dict[str, float]:
    """Time to first token of first and next turns, and how much of the next ones was not computed again."""
    first_ms, second_ms = (statistics.median(record.ttft_s * 1e3 for record in records) for records in (first, second))
    num_cached, num_tokens = (
        sum(getattr(r, name) for r in second) for name in ("num_cached_tokens", "num_prompt_tokens")
    )
    return {
        "first_ttft_p50_ms": first_ms,
        "next_turn_ttft_p50_ms": second_ms,
        "ratio": first_ms / second_ms,
        "next_turn_cached_share": num_cached / num_tokens,
    }


async def again(deployment: Running, num_words: int) -> dict[str, float]:
    """Conversations of which each goes on at once."""
    first, second = [], []
    for said in conversations(num_words):
        first.append(await turn(deployment, said))
        second.append(await turn(deployment, next_turn(said)))
    return compared(first, second)


async def after_eviction(settings: list[str], num_words: int) -> dict[str, float]:
    """Conversations that go on when all have begun."""
    async with running(settings) as deployment:
        await ask(deployment, shared(2, 60, 8), 2, {"cache_salt": "warm-up"})
        first = [await turn(deployment, said) for said in conversations(num_words)]
        second = [await turn(deployment, next_turn(said)) for said in conversations(num_words)]
    return compared(first, second)


async def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    async with running(options.set) as deployment:
        await ask(deployment, shared(2, 60, 8), 2, {"cache_salt": "warm-up"})
        figures = {
            f"{options.streams} streams share {options.words} words": await at_streams(deployment, options),
            "a conversation goes on": await again(deployment, options.words),
        }
    small = [*options.set, SMALL_POOL]
    return figures | {
        "it was evicted meanwhile": await after_eviction(small, options.words),
        "it was evicted to host memory": await after_eviction([*small, HOST_MEMORY], options.words),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the same load with and without the prefix cache")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--words", type=int, default=800)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} at the start")
    results = asyncio.run(measure(options))
    for name, figures in results.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:30}{value:.3f}" if isinstance(value, float) else f"  {key:30}{value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
