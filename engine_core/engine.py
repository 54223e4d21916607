"""The engine interface, its configuration, and the table of engines to choose from by name.

An engine owns weights and KV tensors; it is used from one thread only, the one that loaded it (ENGINE threads: a second
thread would create a second OpenMP team and slow every later step).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_core.batch import Row, Sampled, Scored
from engine_core.block_copies import BlockCopy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is built from.

    `kv_cache_bytes` 0 sizes the pool from the memory that is free to this process (cgroup limit included).
    `host_kv_cache_bytes` is host memory for blocks that are evicted from it, `num_host_blocks` their number otherwise.
    `max_model_len` 0 takes the model's own context length. `num_threads` 0 takes the cores this process may use.
    `step_time_s` is the echo engine's. `quantise` names the format that matrices of other types are brought into (see
    `engine_core.weights.quantise`). `device`, `dtype` and `attention` are the torch engine's, `kv_dtype` is how keys
    and values are kept; "auto" is the engine's own choice, and an engine that cannot honour another one says so.
    `kernel_cache_dir` None is `engine_core.kernels.build.default_cache_dir()`.
    """

    model_path: Path | None = None
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    host_kv_cache_bytes: int = 0
    num_host_blocks: int = 0
    max_model_len: int = 0
    num_threads: int = 0
    step_time_s: float = 0.0
    vocab_size: int = 0
    quantise: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    attention: str = "auto"
    kernel_cache_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine turned out to be, as published in the registry.

    `embedding_size`: values of a hidden state; 0: it has none to give. `num_host_blocks`: see `copy_blocks`.
    """

    name: str
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    device: str
    kernels: str
    embedding_size: int = 0
    num_host_blocks: int = 0


class Engine(Protocol):
    """One accelerator's engine."""

    @property
    def info(self) -> EngineInfo: ...

    def warm_up(self) -> None:
        """Run what the first request would otherwise pay for; leaves nothing in the KV pool that a request reads."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy keys and values from block to block, in order; host blocks are numbered from `num_blocks` on.

        Each copy is between a block of the pool and a host block; ValueError for any other.
        """

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Run all rows through the model, write their keys and values, and sample where asked.

        Returns one entry per row, None where `sampling` is None. A row's result does not depend on the other rows.
        """

    def score(self, row: Row) -> Scored:
        """Run one row that has `scoring` as `step` would, and tell the raw logprobs of its known tokens."""

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows that have `hidden` as `step` would → per row float32 [tokens asked for, embedding_size].

        These are the states behind the final norm, which the LM head reads. A row's do not depend on the other rows or
        on how its sequence was cut into rows. ValueError from an engine whose embedding_size is 0.
        """


Progress = Callable[[str, float], None]
"""(stage, fraction 0..1): called while an engine loads."""

ENGINES: dict[str, str] = {
    "auto": "engine_core.auto:load",
    "native": "engine_core.native:load",
    "reference": "engine_core.reference:load",
    "torch": "engine_core.reference:load_torch",
    "echo": "engine_core.echo:load",
}
"""Name → "module:function" of a loader (EngineConfig, Progress) → Engine; imported only when chosen."""

CHECKS: dict[str, str] = {
    "auto": "engine_core.auto:check",
    "native": "engine_core.native:check",
    "reference": "engine_core.reference:check",
    "torch": "engine_core.reference:check_torch",
    "echo": "engine_core.echo:check",
}
"""Name → "module:function" of a look at what the loader would do (EngineConfig) → text for a person."""


def load_engine(name: str, config: EngineConfig, progress: Progress) -> Engine:
    """Load the engine called `name`.

    Raises KeyError for an unknown name, `engine_core.errors.ModelError` for a model that it cannot run.
    """
    loader: Callable[[EngineConfig, Progress], Engine] = named(ENGINES[name])
    return loader(config, progress)


def check_engine(name: str, config: EngineConfig) -> str:
    """What would compute on this machine, for a person; loads no weights, and needs no model.

    Raises KeyError for an unknown name, ModelError for what `load_engine` would refuse here.
    """
    check: Callable[[EngineConfig], str] = named(CHECKS[name])
    return check(config)


def named(place: str) -> Any:
    """The object at "module:name"."""
    module, name = place.split(":")
    return getattr(import_module(module), name)
