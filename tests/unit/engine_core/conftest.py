"""Tiny random Llama models as GGUF files, for tests that need a model but not a language."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import pytest

WriteTinyModel = Callable[..., Path]


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model; the defaults are awkward on purpose (no size is a multiple of a vector register)."""

    layers: int = 2
    hidden: int = 20
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    inner: int = 28
    vocab: int = 97
    context: int = 128
    tied: bool = True
    seed: int = 0
    weight_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32


def tiny_tensors(shape: TinyShape) -> dict[str, np.ndarray]:
    """Tensors by GGUF name, scaled so that the logits differ clearly."""
    rng = np.random.default_rng(shape.seed)

    def normal(*size: int) -> np.ndarray:
        return (rng.standard_normal(size) / size[-1] ** 0.5).astype(np.float32)

    def gains(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {
        "token_embd.weight": normal(shape.vocab, shape.hidden) * np.float32(4),
        "output_norm.weight": gains(shape.hidden),
    }
    if not shape.tied:
        tensors["output.weight"] = normal(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": gains(shape.hidden),
            f"blk.{layer}.attn_q.weight": normal(shape.heads * shape.head_dim, shape.hidden) * np.float32(3),
            f"blk.{layer}.attn_k.weight": normal(shape.kv_heads * shape.head_dim, shape.hidden),
            f"blk.{layer}.attn_v.weight": normal(shape.kv_heads * shape.head_dim, shape.hidden),
            f"blk.{layer}.attn_output.weight": normal(shape.hidden, shape.heads * shape.head_dim),
            f"blk.{layer}.ffn_norm.weight": gains(shape.hidden),
            f"blk.{layer}.ffn_gate.weight": normal(shape.inner, shape.hidden),
            f"blk.{layer}.ffn_up.weight": normal(shape.inner, shape.hidden),
            f"blk.{layer}.ffn_down.weight": normal(shape.hidden, shape.inner),
        }
    return tensors


def add_metadata(writer: gguf.GGUFWriter, shape: TinyShape) -> None:
    writer.add_name("tiny")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_token_list([f"token{index}" for index in range(shape.vocab)])


def write_model(
    path: Path,
    shape: TinyShape = TinyShape(),
    architecture: str = "llama",
    metadata: dict[str, int | float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    stored: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file. `metadata` and `tensors` add to the model's own or replace them; `stored` names the types of
    single tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, shape)
    add_value = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add_value[type(value)](key, value)
    for name, values in (tiny_tensors(shape) | (tensors or {})).items():
        kind = shape.weight_type if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        kind = (stored or {}).get(name, kind)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_tiny_model(tmp_path: Path) -> WriteTinyModel:
    """Writes one model: `write(shape, architecture=…, metadata={…}, tensors={…}, stored={…})` → its path."""
    return partial(write_model, tmp_path / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model_of(tmp_path_factory: pytest.TempPathFactory) -> WriteTinyModel:
    """Writes a model of given sizes, one file for each: `tiny_model_of(hidden=36, tied=False)` → its path."""
    folder = tmp_path_factory.mktemp("tiny_models")

    @cache
    def write(**sizes: int | bool) -> Path:
        shape = TinyShape(**sizes)
        return write_model(folder / f"{abs(hash(shape))}.gguf", shape)

    return write


@pytest.fixture
def tiny_shape() -> type[TinyShape]:
    return TinyShape
