"""What a setting costs in throughput: two deployments, one with it, measured in turns over HTTP.

    python tests/bench/setting_cost.py --set telemetry.otlp_endpoint=collector [--streams 32] [--rounds 5] [--both …]

`collector` in a setting's place stands for the address of an OTLP receiver that this script starts, in a process of its
own, and that throws away what it gets. `--both` are settings of either deployment, such as `executor.engine=echo`.
Rounds alternate, so that whatever else the machine does meets both. Figures are of this machine as it is.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator

from own_deployment import Running, running

from services.bench.client import RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import Load, run_load
from services.bench.prompts import DatasetChoice, make_prompts

MODEL = "smol"
PROMPT_TOKENS = 120
COLLECTOR = "collector"
RECEIVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments): ...

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Run the receiver, and yield its address."""
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def tokens_per_s(deployment: Running, options: argparse.Namespace, seed: int) -> float:
    """Run one round; returns output tokens per second."""
    choice = DatasetChoice("random", options.streams * 2, PROMPT_TOKENS, options.output_len, seed=seed)
    client = HttpClient(deployment.http_url, RequestOptions(MODEL))
    prompts = make_prompts(choice)
    outcome = await run_load(client, Load(prompts, [0.0] * len(prompts), options.streams))
    client.close()
    if failed := {record.error for record in outcome.records if not record.is_success}:
        raise SystemExit(f"requests failed: {failed}")
    return sum(record.num_output_tokens for record in outcome.records) / outcome.duration_s


async def measure(options: argparse.Namespace, collector_url: str) -> None:
    settings = [text.replace(f"={COLLECTOR}", f"={collector_url}") for text in options.set]
    async with running(options.both) as without, running([*options.both, *settings]) as with_it:
        for deployment in (without, with_it):
            await tokens_per_s(deployment, options, seed=0)
        pairs = []
        for number in range(options.rounds):
            order = (without, with_it) if number % 2 else (with_it, without)
            seen = {id(deployment): await tokens_per_s(deployment, options, number + 1) for deployment in order}
            pairs.append((seen[id(without)], seen[id(with_it)]))
            print(f"  {pairs[-1][0]:8.1f} tok/s without, {pairs[-1][1]:8.1f} with: {pairs[-1][1] / pairs[-1][0]:.3f}")
    ratios = [with_s / without_s for without_s, with_s in pairs]
    cost = 1 - statistics.median(ratios)
    print(f"median cost {cost:.1%} at {options.streams} streams (ratios {min(ratios):.3f} to {max(ratios):.3f})")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a setting costs in throughput, measured in turns")
    parser.add_argument("--set", action="append", required=True, metavar="KEY=VALUE", help="what is measured")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="settings of both sides")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    load = os.getloadavg()[0]
    print(f"{platform.node()}, {os.cpu_count()} cores, load average {load:.1f} at the start")
    with collector() as url:
        asyncio.run(measure(options, url))


if __name__ == "__main__":
    main()
