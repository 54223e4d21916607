"""`python -m tests.bench.simulation`: one run at a size of your choice, and its figures."""

import argparse
import gc
import json
import time
from pathlib import Path

from services.scheduler.planner import Limits
from tests.bench.simulation.executor import Timing
from tests.bench.simulation.fleet import FleetShape, SimulatedFleet
from tests.bench.simulation.report import as_text, report_of
from tests.bench.simulation.trace_shape import Trace, TraceShape


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="router, planner and block pools over many simulated executors")
    parser.add_argument("--executors", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--conversations", type=float, default=6.0, help="beginnings a second, per executor")
    parser.add_argument("--blocks", type=int, default=2048, help="of 16 tokens, per executor")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--prompt-token-ms", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    trace = TraceShape(options.requests, options.conversations * options.executors, seed=options.seed)
    timing = Timing(options.step_ms / 1e3, options.prompt_token_ms / 1e3)
    limits = Limits(options.max_num_seqs, 512, 32, target_itl_s=0.1, ageing_s=60.0)
    shape = FleetShape(options.executors, options.blocks, limits=limits, timing=timing)
    print(f"{options.executors} executors of {options.blocks} blocks, {options.max_num_seqs} sequences at a time")
    print(f"steps of {options.step_ms:g} ms, and {options.prompt_token_ms:g} ms for each prompt token")
    print(trace)
    gc.disable()  # there are no cycles, and millions of living objects to look through for them
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    fleet = SimulatedFleet(shape, Trace(trace))
    fleet.run()
    fleet.check_nothing_is_left()
    cost = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    report = report_of(fleet) | cost
    print(as_text(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
