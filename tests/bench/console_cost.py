"""What the console costs: 32 streams of the echo engine on two deployments in turn, one with a console and one without.

    python tests/bench/console_cost.py [--pairs 6] [--prompts 384]

Pairs are measured in either order in turn, so that what else the machine does hits both. Prints every pair's
throughputs and their ratio, and the median of the ratios.
"""

import argparse
import asyncio
import contextlib
import statistics

from own_deployment import Running, running
from pipeline_overhead import ECHO, MODEL, load_of

from services.bench.client import RequestOptions
from services.bench.http_client import HttpClient
from services.bench.load import run_load

STREAMS = 32
OUTPUT_TOKENS = 64


async def tokens_per_s(deployment: Running, num_prompts: int, seed: int) -> float:
    client = HttpClient(deployment.http_url, RequestOptions(MODEL))
    outcome = await run_load(client, load_of(num_prompts, OUTPUT_TOKENS, STREAMS, seed))
    client.close()
    failed = [record.error for record in outcome.records if not record.is_success]
    assert not failed, failed[:3]
    return sum(record.num_output_tokens for record in outcome.records) / outcome.duration_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=384, help="of one measurement")
    options = parser.parse_args()
    async with contextlib.AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(running([*ECHO, f"console.enabled={value}", "console.port=0"]))
            for name, value in (("without", "false"), ("with", "true"))
        }
        await asyncio.sleep(2.0)  # for the console's own start, and for everybody to know of it
        for deployment in sides.values():
            await tokens_per_s(deployment, options.prompts // 4, seed=1)
        ratios = []
        for pair in range(options.pairs):
            order = ("with", "without") if pair % 2 else ("without", "with")
            figures = {name: await tokens_per_s(sides[name], options.prompts, seed=pair + 2) for name in order}
            ratios.append(figures["with"] / figures["without"])
            print(
                f"without {figures['without']:.0f} tok/s, with {figures['with']:.0f} tok/s: {ratios[-1]:.4f}",
                flush=True,
            )
        print(f"median of {len(ratios)} pairs: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    asyncio.run(main())
