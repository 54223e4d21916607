"""The torch engine on the CPU in every number type: near the reference, bit-stable, and clear about what it is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine_core import torch_options
from engine_core.batch import Row, Sampling
from engine_core.engine import Engine, EngineConfig, load_engine
from engine_core.errors import ModelError, OutOfMemoryError
from engine_core.kernels.binding import CacheKind
from engine_core.native import loading

TOKENS = tuple((7 * number) % 97 for number in range(70))
OTHERS = tuple((11 * number) % 97 for number in range(70))


def load(name: str, path: Path, **settings: Any) -> Any:
    config = EngineConfig(model_path=path, num_blocks=32, num_threads=1, **settings)
    return load_engine(name, config, lambda stage, fraction: None)


@pytest.fixture
def path(tiny_model_of: Callable[..., Path]) -> Path:
    return tiny_model_of(hidden=48, head_dim=16, inner=64)


@pytest.fixture
def native_path(write_tiny_model: Callable[..., Path], tiny_shape: Callable[..., Any]) -> Path:
    return write_tiny_model(tiny_shape(hidden=64, head_dim=32, inner=96, weight_type=GGMLQuantizationType.Q8_0))


def row(tokens: tuple[int, ...], begin: int, end: int, first_block: int, **options: Any) -> Row:
    sampling = Sampling(position=end, seed=0, **options)
    return Row(tokens[begin:end], begin, tuple(range(first_block, first_block + 8)), len(tokens), sampling)


def logits_of(engine: Any) -> torch.Tensor:
    return engine.logits_after_each_token(row(TOKENS, 0, 70, 0))


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"dtype": "float32"}, 1e-4),
        ({"dtype": "float32", "attention": "tiled"}, 0.0),
        ({"dtype": "float32", "kv_dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16"}, 0.25),
        ({"dtype": "bfloat16", "attention": "tiled"}, 0.25),
        ({"dtype": "float16"}, 0.05),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_logits_are_near_those_of_the_reference(path: Path, settings: dict[str, str], tolerance: float) -> None:
    expected = logits_of(load("reference", path))
    difference = (logits_of(load("torch", path, device="cpu", **settings)) - expected).abs().max()
    assert float(difference) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "tiled"])
def test_in_bfloat16_neighbours_and_chunks_change_no_bit(path: Path, attention: str) -> None:
    engine = load("torch", path, device="cpu", dtype="bfloat16", attention=attention)
    [expected] = engine.logits([row(TOKENS, 0, 70, 0)])
    for begin, end in ((0, 1), (1, 20), (20, 37), (37, 70)):
        _, mine = engine.logits([row(OTHERS, begin, end, 16), row(TOKENS, begin, end, 8)])
    assert torch.equal(mine, expected)


def test_it_warms_up_samples_scores_and_says_what_it_is(path: Path) -> None:
    engine: Engine = load("torch", path, device="cpu", kv_dtype="float32")
    assert (engine.info.name, engine.info.device) == ("torch", "cpu")
    assert engine.info.kernels == "torch bfloat16, sdpa attention, float32 keys and values"
    engine.warm_up()
    greedy = row(TOKENS, 0, 70, 0, temperature=0.0)
    with_logprobs = row(TOKENS, 0, 70, 8, temperature=0.0, num_logprobs=3)
    first, second = engine.step([greedy, with_logprobs])
    assert first is not None
    assert second is not None
    assert first.token == second.token == second.top[0][0]
    [hidden] = engine.hidden_states([Row(TOKENS, 0, tuple(range(8)), 70, hidden="last")])
    assert hidden.shape == (1, 48)


def test_a_pool_in_bfloat16_takes_half_the_memory(path: Path) -> None:
    wide, narrow = load("reference", path), load("reference", path, kv_dtype="bfloat16")
    assert narrow.pool.tensor.nbytes * 2 == wide.pool.tensor.nbytes
    by_bytes = {"num_blocks": 0, "kv_cache_bytes": 1 << 17}
    sizes = [
        load_engine(
            "reference", EngineConfig(model_path=path, kv_dtype=kind, **by_bytes), lambda stage, fraction: None
        ).info.num_blocks
        for kind in ("float32", "bfloat16")
    ]
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize(
    ("engine", "settings", "words"),
    [
        ("reference", {"dtype": "bfloat16"}, "reference engine has dtype float32"),
        ("reference", {"device": "cuda"}, "reference engine has device cpu"),
        ("reference", {"attention": "sdpa"}, "reference engine has attention tiled"),
        ("reference", {"kv_dtype": "int8"}, "kv_dtype 'int8'"),
        ("torch", {"kv_dtype": "int8"}, "kv_dtype 'int8'"),
        ("torch", {"dtype": "float8"}, "dtype 'float8'"),
        ("torch", {"attention": "flash9"}, "no attention 'flash9'"),
        ("torch", {"device": "toaster"}, "no device 'toaster'"),
        ("native", {"device": "cuda"}, "native engine runs on the CPU"),
        ("native", {"dtype": "float32"}, "native engine runs on the CPU"),
        ("native", {"kv_dtype": "float64"}, "kv_dtype 'float64'"),
    ],
)
def test_what_an_engine_cannot_honour_is_refused(
    native_path: Path, engine: str, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        load(engine, native_path, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_named(path: Path) -> None:
    with pytest.raises(ModelError, match="'cuda:3' is not here: 0 CUDA devices"):
        load("torch", path, device="cuda:3")
    assert torch_options.device_of("auto") == torch.device("cpu")


def test_weights_that_do_not_fit_are_refused_by_their_number_type(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_options, "available_memory_bytes", lambda: 10_000)
    with pytest.raises(OutOfMemoryError, match="as bfloat16"):
        load("torch", path, device="cpu")


def test_auto_takes_the_torch_engine_for_who_asks_for_a_number_type(native_path: Path) -> None:
    assert load("auto", native_path).info.name == "native"
    assert load("auto", native_path, dtype="bfloat16", device="cpu").info.name == "torch"
    assert load("auto", native_path, attention="sdpa").info.name == "torch"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("auto", CacheKind.INT8), ("int8", CacheKind.INT8), ("float32", CacheKind.F32), ("bfloat16", CacheKind.BF16)],
)
def test_the_native_engine_keeps_keys_and_values_as_asked(
    native_path: Path, tmp_path: Path, name: str, kind: CacheKind
) -> None:
    config = EngineConfig(model_path=native_path, kv_dtype=name, kernel_cache_dir=tmp_path)
    assert loading.options_of(config) == loading.NativeOptions(kind, kernel_cache_dir=tmp_path)
    engine = load("native", native_path, kv_dtype=name)
    assert engine.step([row(TOKENS, 0, 70, 0, temperature=0.0)])[0].token >= 0
