"""Native engines over tiny random models in quantised file types, and over the default model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import pytest

from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.kernels.binding import CacheKind
from engine_core.kernels.instruction_sets import best_instruction_set, cpu_flags
from engine_core.native.engine import NativeEngine
from engine_core.native.loading import NativeOptions, load

LoadNative = Callable[..., NativeEngine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if best_instruction_set(cpu_flags()) is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip("this processor has no AVX2"))


def load_native_engine(path: Path | None, *, cache_kind: CacheKind = CacheKind.INT8, **settings: int) -> NativeEngine:
    config = EngineConfig(model_path=path, **{"num_blocks": 16, "num_threads": 2} | settings)
    return load(config, lambda stage, fraction: None, NativeOptions(cache_kind))


@pytest.fixture(scope="session")
def load_native() -> LoadNative:
    """`load_native(path, cache_kind=…, num_blocks=…)` → engine."""
    return load_native_engine


@pytest.fixture
def quantised_shape(tiny_shape) -> Callable[..., object]:
    """Sizes that the kernels take: `quantised_shape(weight_type=…, heads=…)`."""
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "inner": 96, "context": 256}
    return partial(tiny_shape, **sizes | {"weight_type": gguf.GGMLQuantizationType.Q8_0})


def greedy_row(tokens: tuple[int, ...], start: int, blocks: tuple[int, ...]) -> Row:
    end = start + len(tokens)
    return Row(tokens, start, blocks, end, Sampling(position=end, seed=0, temperature=0.0))


@pytest.fixture
def greedy() -> Callable[..., Row]:
    """A row that samples greedily: `greedy(tokens, start, blocks)`."""
    return greedy_row
