"""Whether the services' memory stays flat: many short requests through one deployment, and the resident set of each.

    python tests/bench/memory_growth.py [--engine native] [--requests 10000] [--limit-s 180] [--json FILE]

The executor may take 1.5 times the model file, the KV pool, and 400 MB. What it and the others take after a fifth of
the requests, when pools and caches are full, they may exceed by 32 MB at the end. Exits with 1 when that does not hold.
"""

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from own_deployment import Running, running

from engine_core.kernels.binding import CacheKind
from engine_core.models import read_supported_config
from engine_core.weights.opening import open_model
from schemas.generation import GenerateRequest
from services.runtime.generation import generate
from services.runtime.model_source import resolve
from services.runtime.registry import Registry
from services.runtime.settings import ModelSettings

STREAMS = 32
NUM_BLOCKS, BLOCK_SIZE = 1024, 16
SHORT = {"max_tokens": 4, "temperature": 0.0}
WARM_SHARE = 0.2
ALLOWED_GROWTH_BYTES = 32 << 20
ALLOWED_EXECUTOR_BYTES = 400 << 20
MODEL_SHARE = 1.5
ECHO = ("executor.engine=echo", "model.source=builtin:bytes")


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes resident by instance, when the deployment was ready, when it was warm, and at the end."""

    num_requests: int
    duration_s: float
    ready: dict[str, int]
    warm: dict[str, int]
    end: dict[str, int]

    def growth(self) -> dict[str, int]:
        """Bytes by instance since it was warm."""
        return {name: self.end[name] - size for name, size in self.warm.items() if name in self.end}


class Requests:
    """Sends requests until there have been enough or time is up; notes the memory on the way."""

    def __init__(self, deployment: Running, registry: Registry, num_requests: int, limit_s: float) -> None:
        self._bus = deployment.bus
        self._registry = registry
        self._num_requests = num_requests
        self._deadline_s = perf_counter() + limit_s
        self._numbers = itertools.count()
        self.num_done = 0
        self.warm: dict[str, int] = {}

    async def run(self) -> Figures:
        started_s, ready = perf_counter(), self._resident()
        await asyncio.gather(*(self._stream() for _ in range(STREAMS)))
        return Figures(self.num_done, perf_counter() - started_s, ready, self.warm, self._resident())

    async def _stream(self) -> None:
        for number in self._due():
            request = GenerateRequest(model="smol", prompt=f"Toad number {number} said:", **SHORT)
            async with generate(self._bus, request) as chunks:
                async for chunk in chunks:
                    assert chunk.error is None, chunk.error
            self.num_done += 1
            if self.num_done >= WARM_SHARE * self._num_requests and not self.warm:
                self.warm = self._resident()

    def _due(self) -> Iterator[int]:
        while perf_counter() < self._deadline_s and (number := next(self._numbers)) < self._num_requests:
            yield number

    def _resident(self) -> dict[str, int]:
        """Bytes by instance, of this machine's /proc."""
        return {e.registration.instance: resident_bytes(e.registration.pid) for e in self._registry.entries()}


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} has no memory")


def executor_allowance(engine: str) -> int:
    """What the executor may take, in bytes."""
    if engine == "echo":
        return ALLOWED_EXECUTOR_BYTES
    path = resolve(ModelSettings())
    numbers = read_supported_config(open_model(path)).kv_floats_per_token * NUM_BLOCKS * BLOCK_SIZE
    kind = CacheKind.INT8 if engine == "native" else CacheKind.F32
    return int(MODEL_SHARE * path.stat().st_size) + kind.bytes_of(numbers) + ALLOWED_EXECUTOR_BYTES


async def measure(engine: str, num_requests: int, limit_s: float) -> Figures:
    settings = ECHO if engine == "echo" else (f"executor.engine={engine}",)
    async with (
        running((*settings, f"executor.num_blocks={NUM_BLOCKS}")) as deployment,
        Registry(deployment.bus) as registry,
    ):
        return await Requests(deployment, registry, num_requests, limit_s).run()


def report(engine: str, figures: Figures) -> bool:
    """Print a table; True when everything is within its bounds."""
    rate = figures.num_requests / figures.duration_s
    print(f"{engine}: {figures.num_requests} requests in {figures.duration_s:.0f} s ({rate:.0f}/s)")
    print(f"{'instance':<18}{'ready MB':>12}{'warm MB':>12}{'end MB':>12}{'growth MB':>12}")
    for name, growth in sorted(figures.growth().items()):
        sizes = (figures.ready.get(name, 0), figures.warm[name], figures.end[name], growth)
        print(f"{name:<18}" + "".join(f"{size / 1e6:>12.1f}" for size in sizes))
    allowed, taken = executor_allowance(engine), figures.end["executor-0"]
    print(f"executor: {taken / 1e6:.0f} MB of {allowed / 1e6:.0f} MB allowed")
    too_much = {name for name, size in figures.growth().items() if size > ALLOWED_GROWTH_BYTES}
    if too_much:
        print(f"not flat: {', '.join(sorted(too_much))}")
    return not too_much and taken <= allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="native", choices=("native", "reference", "echo"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    wish = parser.parse_args()
    figures = asyncio.run(measure(wish.engine, wish.requests, wish.limit_s))
    if not figures.warm:
        print(f"only {figures.num_requests} requests in {figures.duration_s:.0f} s: too few to tell")
        return 1
    if wish.json is not None:
        wish.json.write_text(json.dumps(asdict(figures)))
    return 0 if report(wish.engine, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
