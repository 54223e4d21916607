"""Invariant 3, bit for bit, with the default model: 40 prompts, every generated position.

The logits of a sequence alone, prefilled whole, with two threads, are compared with those in batches with random
neighbours, with other chunks, with one thread, and with other instruction sets.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.kernels.binding import CacheKind
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS, cpu_flags
from engine_core.native.engine import NativeEngine
from engine_core.native.loading import NativeOptions, load

NUM_PROMPTS = 40
NUM_GENERATED = 4
BLOCKS_EACH = 10
MAX_ROWS = 33
Tokens = tuple[int, ...]
History = list[bytes]
"""The logits of every generated position."""


def load_engine(
    path: Path, *, threads: int = 2, kind: CacheKind = CacheKind.INT8, instruction_set: str | None = None
) -> NativeEngine:
    config = EngineConfig(model_path=path, num_blocks=MAX_ROWS * BLOCKS_EACH, num_threads=threads, max_model_len=160)
    return load(config, lambda stage, fraction: None, NativeOptions(kind, instruction_set))


@dataclass
class Run:
    """One sequence in an engine: what it has computed, what is pending, and its blocks."""

    prompt: Tokens
    blocks: tuple[int, ...]
    chunk: int
    done: int = 0
    generated: list[int] = field(default_factory=list)
    history: History = field(default_factory=list)

    def next_row(self) -> Row:
        if self.done >= len(self.prompt):
            tokens: Tokens = (self.generated[-1],)
        else:
            tokens = self.prompt[self.done : self.done + self.chunk]
        end = self.done + len(tokens)
        return Row(tokens, self.done, self.blocks, len(self.prompt), Sampling(position=end, seed=0))

    def take(self, row: Row, logits: np.ndarray) -> None:
        self.done += len(row.tokens)
        if self.done >= len(self.prompt):
            self.history.append(logits.tobytes())
            self.generated.append(int(logits.argmax()))


def generate(engine: NativeEngine, prompts: list[Tokens], *, chunk: int = 1000, seed: int = 0) -> list[History]:
    """Run all prompts together until each has NUM_GENERATED tokens; blocks and starting times are random."""
    source = random.Random(seed)
    places = source.sample(range(MAX_ROWS), len(prompts))
    runs = []
    for place, prompt in zip(places, prompts, strict=True):
        blocks = list(range(place * BLOCKS_EACH, (place + 1) * BLOCKS_EACH))
        source.shuffle(blocks)
        runs.append(Run(prompt, tuple(blocks), chunk))
    while True:
        unfinished = [run for run in runs if len(run.history) < NUM_GENERATED]
        if not unfinished:
            return [run.history for run in runs]
        # Now and then somebody pauses, so that prefill and decode meet in one step.
        active = [run for run in unfinished if source.random() < 0.9] or unfinished
        source.shuffle(active)
        rows = [run.next_row() for run in active]
        for run, row, logits in zip(active, rows, engine.logits(rows).numpy(), strict=True):
            run.take(row, logits)


def in_batches(engine: NativeEngine, prompts: list[Tokens], size: int, neighbours: list[Tokens]) -> list[History]:
    histories: list[History] = []
    for first in range(0, len(prompts), size):
        mine = prompts[first : first + size]
        filled = [*mine, *random.Random(first).choices(neighbours, k=size - len(mine))]
        histories += generate(engine, filled, seed=first)[: len(mine)]
    return histories


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    """Most are short, which costs less; every fourth may be longer than the longest chunk."""
    source = random.Random(1)
    lengths = [source.randrange(3, 50 if index % 4 else 130) for index in range(NUM_PROMPTS)]
    return [tuple(source.randrange(49152) for _ in range(length)) for length in lengths]


@pytest.fixture(scope="module")
def engine(model_path) -> NativeEngine:
    return load_engine(model_path)


@pytest.fixture(scope="module")
def alone(engine, prompts) -> list[History]:
    return [generate(engine, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("size", [2, 7, 16, 32])
def test_in_a_batch_with_random_neighbours(engine, prompts, alone, size):
    assert in_batches(engine, prompts, size, prompts) == alone


@pytest.mark.parametrize("chunk", [1, 16, 17, 64])
def test_in_chunks(engine, prompts, alone, chunk):
    # Twenty at a time, which the batches above allow; one by one a chunk of 1 would be most of the test's time.
    histories = [*generate(engine, prompts[:20], chunk=chunk), *generate(engine, prompts[20:], chunk=chunk)]
    assert histories == alone


def test_with_one_thread(model_path, prompts, alone):
    engine = load_engine(model_path, threads=1)
    assert in_batches(engine, prompts, 8, prompts) == alone


def test_with_more_threads_than_cores(model_path, prompts, alone):
    engine = load_engine(model_path, threads=5)
    assert in_batches(engine, prompts, 20, prompts) == alone


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_with_every_instruction_set(model_path, prompts, alone, instruction_set):
    if not INSTRUCTION_SETS[instruction_set].cpu_flags <= cpu_flags():
        pytest.skip(f"this processor has no {instruction_set}")
    engine = load_engine(model_path, instruction_set=instruction_set)
    assert in_batches(engine, prompts[:8], 8, prompts) == alone[:8]


@pytest.mark.parametrize("kind", [CacheKind.F32, CacheKind.F16, CacheKind.BF16])
def test_with_other_kinds_of_cache(model_path, prompts, kind):
    engine = load_engine(model_path, kind=kind)
    some = prompts[:7]
    assert in_batches(engine, some, 7, prompts) == [generate(engine, [prompt], chunk=17)[0] for prompt in some]


def test_greedy_tokens_of_the_kernels_are_the_first_largest_logits(engine, prompts):
    rows = []
    for place, prompt in enumerate(prompts[:8]):
        blocks = tuple(range(place * BLOCKS_EACH, (place + 1) * BLOCKS_EACH))
        rows.append(Row(prompt, 0, blocks, len(prompt), Sampling(position=len(prompt), seed=0, temperature=0.0)))
    sampled = [answer.token for answer in engine.step(rows) if answer is not None]
    assert sampled == engine.logits(rows).argmax(dim=1).tolist()
