"""How fast the native engine is, alone, as a share of what this machine can do.

    python tests/bench/engine_native.py MODEL.gguf [--rows 1,2,4] [--context 200] [--threads N] [--cache-kind INT8]

Decode is greedy with every row at the same context; a step's roofline is the larger of (bytes of weights and of the
keys and values read) / bandwidth and (multiply-accumulates) / peak, both measured in this run. Compare only within one
run.
"""

import argparse
import ctypes
import random
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.kernels.binding import CacheKind, load_library
from engine_core.limits import usable_cores
from engine_core.models import read_supported_config
from engine_core.native.engine import NativeEngine
from engine_core.native.loading import NativeOptions, load, matrices
from engine_core.weights.gguf import open_gguf

PROBE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's limits and the model's demands."""

    bytes_per_s: float
    macs_per_s: float
    weight_bytes: int
    layer_macs: int
    head_macs: int
    token_bytes: int

    def decode_s(self, rows: int, context: int) -> float:
        num_bytes = self.weight_bytes + rows * context * self.token_bytes
        return max(num_bytes / self.bytes_per_s, rows * (self.layer_macs + self.head_macs) / self.macs_per_s)

    def prefill_s(self, tokens: int) -> float:
        return max(self.weight_bytes / self.bytes_per_s, tokens * self.layer_macs / self.macs_per_s)


def measure_roofline(path: Path, library: ctypes.CDLL, threads: int, cache_kind: CacheKind) -> Roofline:
    file = open_gguf(path)
    config = read_supported_config(file)
    head = config.hidden_size * config.vocab_size
    sizes = [matrix.tensor.num_values for matrix in matrices(file, config)]
    return Roofline(
        bytes_per_s=library.nj_measure_bandwidth(threads, PROBE_BYTES),
        macs_per_s=library.nj_measure_dot_products(threads),
        weight_bytes=sum(matrix.tensor.size_bytes for matrix in matrices(file, config)),
        layer_macs=sum(sizes) - head * (1 if config.tied_embeddings else 2),
        head_macs=head,
        token_bytes=cache_kind.bytes_of(config.kv_floats_per_token),
    )


def blocks_of(index: int, context: int, block_size: int) -> tuple[int, ...]:
    count = -(-(context + 1) // block_size)
    return tuple(range(index * count, (index + 1) * count))


def fill(engine: NativeEngine, rows: int, context: int, rng: random.Random) -> None:
    """Give every row a context of random tokens."""
    size = engine.info.block_size
    for index in range(rows):
        tokens = tuple(rng.randrange(engine.info.vocab_size) for _ in range(context))
        engine.step([Row(tokens, 0, blocks_of(index, context, size), context)])


def decode_s(engine: NativeEngine, rows: int, context: int, repeats: int, rng: random.Random) -> list[float]:
    size, seconds = engine.info.block_size, []
    for _ in range(repeats):
        batch = [
            Row(
                (rng.randrange(engine.info.vocab_size),),
                context,
                blocks_of(index, context, size),
                context,
                Sampling(context + 1, 0, temperature=0.0),
            )
            for index in range(rows)
        ]
        begin = time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)


def prefill_s(engine: NativeEngine, tokens: int, chunk: int, repeats: int, rng: random.Random) -> list[float]:
    """Seconds for one prompt of `tokens` in chunks of `chunk`, sampling its first token."""
    blocks, seconds = blocks_of(0, tokens, engine.info.block_size), []
    for _ in range(repeats):
        prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(tokens))
        begin = time.perf_counter()
        for start in range(0, tokens, chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == tokens
            engine.step([Row(part, start, blocks, tokens, Sampling(tokens, 0, temperature=0.0) if last else None)])
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="engine-only decode and prefill of the native engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prompts", default="128,256,512")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cache-kind", choices=[kind.name for kind in CacheKind], default="INT8")
    parser.add_argument("--instruction-set")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    rng = random.Random(0)
    kind, counts = CacheKind[options.cache_kind], [int(count) for count in options.rows.split(",")]
    num_blocks = max(max(counts) * len(blocks_of(0, options.context, 16)), 600)
    config = EngineConfig(model_path=options.model, num_blocks=num_blocks, num_threads=options.threads)
    begin = time.perf_counter()
    engine = load(config, lambda _stage, _done: None, NativeOptions(kind, options.instruction_set))
    print(f"loaded in {time.perf_counter() - begin:.2f} s: {engine.info}")
    engine.warm_up()
    fill(engine, max(counts), options.context, rng)
    threads = options.threads or usable_cores()
    roofline = measure_roofline(options.model, load_library(None, options.instruction_set), threads, kind)
    print(f"bandwidth {roofline.bytes_per_s / 1e9:.1f} GB/s, dot products {roofline.macs_per_s / 1e9:.0f} GMAC/s")
    print("rows   ms/step (median, min)   tokens/s   share of roofline (median, best)")
    for rows in counts:
        seconds = decode_s(engine, rows, options.context, options.repeats, rng)
        median, limit = statistics.median(seconds), roofline.decode_s(rows, options.context)
        print(
            f"{rows:4d}   {median * 1e3:8.2f} {seconds[0] * 1e3:8.2f}        {rows / median:8.0f}   "
            f"{limit / median:5.0%} {limit / seconds[0]:5.0%}"
        )
    for tokens in (int(count) for count in options.prompts.split(",")):
        seconds = prefill_s(engine, tokens, options.chunk, max(options.repeats // 5, 3), rng)
        median, limit = statistics.median(seconds), roofline.prefill_s(tokens)
        best = tokens / seconds[0]
        print(f"prefill {tokens:5d}: {tokens / median:6.0f} tokens/s (best {best:.0f}), {limit / median:.0%}")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
