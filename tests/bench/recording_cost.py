"""What a recorder costs in throughput, running and stopped (SIGSTOP): measured in turns with none, over HTTP.

    python tests/bench/recording_cost.py [--streams 32] [--rounds 4] [--both executor.engine=echo]

In every round each condition is measured once, in another order, so that whatever else the machine does meets all of
them. Figures are of this machine as it is: run it on an idle one.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from own_deployment import Running, running

from schemas.control import EffectiveConfig
from services.bench.client import RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import Load, run_load
from services.bench.prompts import DatasetChoice, make_prompts
from services.recording.capture_file import Capture, Note

MODEL = "smol"
PROMPT_TOKENS = 120
NONE, RECORDING, STOPPED = "no recorder", "recording", "recorder stopped"
CONDITIONS = (NONE, RECORDING, STOPPED)


async def bus_url(deployment: Running) -> str:
    """Return where the deployment's bus is, as its services were told."""
    entries = await deployment.bus.kv_entries(deployment.bus.subjects.config, EffectiveConfig)
    return str(entries[0].message.values["bus.url"].value)


@contextlib.asynccontextmanager
async def recorder(url: str, path: Path, condition: str) -> AsyncIterator[list[float]]:
    """Run a recorder, stop it in its tracks where that is the condition, and end it.

    The list that it yields is given the recorder's processor seconds at the end, without those of its start.
    """
    used_s: list[float] = []
    if condition == NONE:
        yield used_s
        return
    command = (sys.executable, "-m", "services.cli", "record", "-o", str(path), "--set", f"bus.url={url}")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    if b"Recording to" not in (line := await process.stderr.readline()):
        raise SystemExit(f"the recorder did not start: {line!r}")
    if condition == STOPPED:
        process.send_signal(signal.SIGSTOP)
    started_s = cpu_s(process.pid)
    yield used_s
    used_s.append(cpu_s(process.pid) - started_s)
    process.send_signal(signal.SIGCONT if condition == STOPPED else signal.SIGINT)
    if condition == STOPPED:
        process.kill()
    await process.wait()


def cpu_s(pid: int) -> float:
    """Return a process's user and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def tokens_per_s(deployment: Running, options: argparse.Namespace, seed: int) -> float:
    """Run one load; returns output tokens per second."""
    choice = DatasetChoice("random", options.requests, PROMPT_TOKENS, options.output_len, seed=seed)
    client = HttpClient(deployment.http_url, RequestOptions(MODEL))
    prompts = make_prompts(choice)
    outcome = await run_load(client, Load(prompts, [0.0] * len(prompts), options.streams))
    client.close()
    if failed := {record.error for record in outcome.records if not record.is_success}:
        raise SystemExit(f"requests failed: {failed}")
    return sum(record.num_output_tokens for record in outcome.records) / outcome.duration_s


async def measure(options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {condition: [] for condition in CONDITIONS}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "traffic.jsonl.zst"
        async with running(options.both) as deployment:
            url = await bus_url(deployment)
            seeds = itertools.count()  # the same prompts again would be in the prefix cache
            await tokens_per_s(deployment, options, next(seeds))
            for number in range(options.rounds):
                for condition in (*CONDITIONS[number % 3 :], *CONDITIONS[: number % 3]):
                    async with recorder(url, path, condition) as used_s:
                        rates[condition].append(await tokens_per_s(deployment, options, next(seeds)))
                    if condition == RECORDING:
                        said = {**closing(path), "num_bytes": path.stat().st_size, "cpu_s": used_s[0]}
                shown = ", ".join(f"{condition} {rates[condition][-1]:7.1f}" for condition in CONDITIONS)
                print(f"  tok/s: {shown}", flush=True)
        print(f"the last recording: {said}")
    for condition in (RECORDING, STOPPED):
        ratios = [rate / none for rate, none in zip(rates[condition], rates[NONE], strict=True)]
        means = statistics.mean(rates[condition]) / statistics.mean(rates[NONE])
        print(
            f"{condition}: median cost {1 - statistics.median(ratios):.1%}, of the means {1 - means:.1%}, at "
            f"{options.streams} streams (ratios {min(ratios):.3f} to {max(ratios):.3f})"
        )


def closing(path: Path) -> dict[str, object]:
    """Return what a recording says at its end."""
    return next((dict(line.facts) for line in Capture(path) if isinstance(line, Note) and line.kind == "end"), {})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a recorder costs in throughput, measured in turns")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="settings of the deployment")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64, help="of one measurement")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    print(f"{platform.node()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start")
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
