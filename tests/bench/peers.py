"""Natterjack beside other engines on this machine: the same model file, the same prompts, in one run, taking turns.

    python tests/bench/peers.py --model MODEL.gguf --openvino-python /path/to/venv/bin/python [--json FILE]
        [--set executor.engine=native] [--streams 1,16,32] [--runs 3] [--only natterjack,openvino-Q8_0]

Each run starts one engine after the other, warms it, and asks it at each number of streams for answers of 64 tokens to
English prompts of about 90 words; the next run takes them in another order and has other prompts. The table shows the
medians over the runs. Natterjack, llama-server and vLLM are asked over HTTP with streaming by one and the same client;
OpenVINO GenAI has no server in its package and runs offline, prefill included, which is to its advantage. Peers that
are not installed are named and left out. Compare figures only within one run, and run it on an idle machine.

OpenVINO GenAI: `pip install openvino-genai` into an environment of its own. vLLM needs a checkpoint directory of the
model (--vllm-model), for it reads no GGUF file.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_deployment import running
from peer_processes import http_server, vllm_is_importable, worker
from requantise import requantised

from services.bench.client import RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import Load, run_load
from services.bench.prompts import DatasetChoice, Prompt, make_prompts
from services.bench.statistics import percentile

SHIPPED = "shipped"
OPENVINO_FORMATS = (SHIPPED, "Q8_0", "Q4_0")
LLAMA_FORMATS = (SHIPPED, "Q8_0", "Q4_0")
WARM_UP_SEED = 1_000_003
WARM_UP_TOKENS = 16
FEWEST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What one engine did in one run at one number of streams; `tpot_p50_ms` is 0 where it is not known."""

    output_tokens_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float = 0.0


Measure = Callable[[list[Prompt], int], Awaitable[Figures]]
Engine = Callable[[], AbstractAsyncContextManager[Measure]]
"""Starts an engine for the time of the block, and yields what measures it with prompts at so many streams."""


# ---- the engines


def natterjack(settings: list[str]) -> Engine:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Measure]:
        async with running(settings) as deployment, over_http(deployment.http_url, {}) as measure:
            yield measure

    return start


def openai_server(argv: Callable[[int], list[str]], extra: dict[str, Any]) -> Engine:
    """Return an engine that is a program with OpenAI's HTTP; `argv` makes its arguments from a port."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Measure]:
        async with http_server(argv) as url, over_http(url, extra) as measure:
            yield measure

    return start


@contextlib.asynccontextmanager
async def over_http(url: str, extra: dict[str, Any]) -> AsyncIterator[Measure]:
    asking = HttpClient(url, RequestOptions(""))
    model = await asking.first_model()
    asking.close()
    client = HttpClient(url, RequestOptions(model, extra=extra))

    async def measure(prompts: list[Prompt], streams: int) -> Figures:
        outcome = await run_load(client, Load(prompts, [0.0] * len(prompts), streams))
        if failed := {record.error for record in outcome.records if not record.is_success}:
            raise SystemExit(f"{url}: requests failed: {failed}")
        return Figures(
            sum(record.num_output_tokens for record in outcome.records) / outcome.duration_s,
            percentile(sorted(record.ttft_s * 1e3 for record in outcome.records), 50),
            percentile(sorted((record.tpot_s or 0.0) * 1e3 for record in outcome.records), 50),
        )

    yield measure
    client.close()


def openvino(python: Path, model: Path, properties: str) -> Engine:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Measure]:
        script = Path(__file__).with_name("openvino_worker.py")
        async with worker([str(python), str(script), str(model), properties]) as ask:

            async def measure(prompts: list[Prompt], streams: int) -> Figures:
                texts = [prompt.content for prompt in prompts]
                answer = await ask({"prompts": texts, "max_tokens": prompts[0].max_tokens, "streams": streams})
                ttfts_ms = sorted(ttft_s * 1e3 for ttft_s in answer["ttfts_s"])
                return Figures(answer["num_tokens"] / answer["duration_s"], percentile(ttfts_ms, 50))

            yield measure

    return start


def llama_server(binary: str, model: Path, streams: int, cores: int) -> Engine:
    def argv(port: int) -> list[str]:
        sizes = ["-t", str(cores), "-np", str(streams), "-c", str(512 * streams)]
        return [binary, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *sizes]

    return openai_server(argv, {"cache_prompt": False})


def vllm(python: str, model: Path, streams: int) -> Engine:
    def argv(port: int) -> list[str]:
        options = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--max-num-seqs",
            str(streams),
            "--max-model-len",
            "2048",
        ]
        return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]

    return openai_server(argv, {})


def engines(options: argparse.Namespace) -> dict[str, Engine]:
    """Return the engines that can run here, by name, and say which cannot."""
    model, most = options.model.absolute(), max(options.streams)

    def in_format(name: str) -> Path:
        return model if name == SHIPPED else requantised(model, name, options.work_dir)

    found: dict[str, Engine] = {"natterjack": natterjack([f"model.source={model}", *options.set])}
    if options.openvino_python:
        for name in options.openvino_formats:
            found[f"openvino-{name}"] = openvino(options.openvino_python, in_format(name), options.openvino_properties)
    else:
        print("left out: OpenVINO GenAI (give --openvino-python)")
    if binary := shutil.which("llama-server"):
        for name in options.llama_formats:
            found[f"llama-server-{name}"] = llama_server(binary, in_format(name), most, os.cpu_count() or 1)
    else:
        print("left out: llama-server (not on PATH)")
    if options.vllm_model and vllm_is_importable(options.vllm_python):
        found["vllm"] = vllm(options.vllm_python, options.vllm_model, most)
    else:
        print("left out: vLLM (not importable, or no --vllm-model)")
    return {name: engine for name, engine in found.items() if not options.only or name in options.only}


# ---- the runs


def prompts_of(num_prompts: int, output_len: int, seed: int) -> list[Prompt]:
    return make_prompts(DatasetChoice(num_prompts=num_prompts, output_len=output_len, seed=seed))


async def one_turn(engine: Engine, options: argparse.Namespace, run: int) -> dict[int, Figures]:
    """Start an engine and measure it at every number of streams; seeds depend on the run only."""
    async with engine() as measure:
        most = max(options.streams)
        await measure(prompts_of(most, WARM_UP_TOKENS, WARM_UP_SEED), most)
        await measure(prompts_of(1, WARM_UP_TOKENS, WARM_UP_SEED + 1), 1)
        figures = {}
        for streams in options.streams:
            num_prompts = max(streams * options.waves, FEWEST_PROMPTS)
            prompts = prompts_of(num_prompts, options.output_len, seed=run * 1000 + streams)
            figures[streams] = await measure(prompts, streams)
        return figures


async def all_runs(options: argparse.Namespace) -> dict[str, dict[int, list[Figures]]]:
    """Let the engines take turns; each run begins with another one."""
    chosen = list(engines(options).items())
    results: dict[str, dict[int, list[Figures]]] = {name: {n: [] for n in options.streams} for name, _ in chosen}
    for run in range(options.runs):
        shift = run % len(chosen)
        for name, engine in chosen[shift:] + chosen[:shift]:
            for streams, figures in (await one_turn(engine, options, run)).items():
                results[name][streams].append(figures)
                tokens, ttft = figures.output_tokens_per_s, figures.ttft_p50_ms
                print(
                    f"run {run + 1}, {name}, {streams} streams: {tokens:.1f} tokens/s, TTFT {ttft:.0f} ms", flush=True
                )
    return results


def medians(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*(asdict(run).values() for run in runs), strict=True)))


def show(results: dict[str, dict[int, list[Figures]]], options: argparse.Namespace) -> None:
    print(f"\nmedians of {options.runs} runs: output tokens/s (lowest to highest), TTFT p50")
    print(f"{'':24}" + "".join(f"{f'{streams} streams':>34}" for streams in options.streams))
    for name, by_streams in results.items():
        cells = []
        for streams in options.streams:
            tokens = sorted(run.output_tokens_per_s for run in by_streams[streams])
            middle = medians(by_streams[streams])
            spread = f"{tokens[0]:.0f}-{tokens[-1]:.0f}"
            cells.append(f"{middle.output_tokens_per_s:.1f} ({spread}), {middle.ttft_p50_ms:.0f} ms")
        print(f"{name:24}" + "".join(f"{cell:>34}" for cell in cells))
    if "natterjack" in results and len(results) > 1:
        print(f"{'ours / best peer':24}" + "".join(f"{_ratio(results, streams):>34}" for streams in options.streams))


def _ratio(results: dict[str, dict[int, list[Figures]]], streams: int) -> str:
    speeds = {name: medians(by_streams[streams]).output_tokens_per_s for name, by_streams in results.items()}
    ours = speeds.pop("natterjack")
    best = max(speeds, key=lambda name: speeds[name])
    return f"{ours / speeds[best]:.2f} x {best}"


def as_json(results: dict[str, dict[int, list[Figures]]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model.name,
        "settings": options.set,
        "output_tokens": options.output_len,
        "cores": os.cpu_count(),
        "engines": {
            name: {
                streams: {"median": asdict(medians(runs)), "runs": [asdict(run) for run in runs]}
                for streams, runs in by_streams.items()
            }
            for name, by_streams in results.items()
        },
    }


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Natterjack beside other engines, in one run")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file that every engine runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of Natterjack")
    parser.add_argument("--streams", type=numbers, default=[1, 16, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--waves", type=int, default=2, help="prompts per stream")
    parser.add_argument("--only", type=words, default=[], help="names of engines, by comma")
    parser.add_argument("--openvino-python", type=Path, help="Python that has openvino-genai")
    parser.add_argument("--openvino-formats", type=words, default=list(OPENVINO_FORMATS))
    parser.add_argument("--openvino-properties", default="{}", help="JSON object for its CPU plugin")
    parser.add_argument("--llama-formats", type=words, default=list(LLAMA_FORMATS))
    parser.add_argument("--vllm-python", default="python3", help="Python that has vllm")
    parser.add_argument("--vllm-model", type=Path, help="checkpoint directory of the same model")
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache/natterjack/bench")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"load average {os.getloadavg()[0]:.1f} at the start")
    results = asyncio.run(all_runs(options))
    show(results, options)
    if options.json:
        options.json.write_text(json.dumps(as_json(results, options), indent=2) + "\n")


if __name__ == "__main__":
    main()
