"""Checkpoints that transformers writes, run by the reference engine: the same logits, whatever their form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core import reference
from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig, load_engine
from engine_core.errors import ModelError, ModelFileError, UnsupportedModelError
from engine_core.native import load as load_native
from engine_core.weights.checkpoint import open_checkpoint
from engine_core.weights.opening import open_model
from tests.checkpoint_export import export_checkpoint

TOKENS = tuple((5 * number + 1) % 90 for number in range(40))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WriteCheckpoint = Callable[..., tuple[Path, LlamaForCausalLM]]


def quiet(stage: str, fraction: float) -> None:
    pass


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Write a random model: `write_checkpoint(dtype=…, shard_size=…, tie_word_embeddings=…)` → (directory, model)."""

    def write(
        dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **fields: Any
    ) -> tuple[Path, LlamaForCausalLM]:
        torch.manual_seed(4)
        sizes: dict[str, Any] = {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "rope_theta": 1000.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
        }
        model = LlamaForCausalLM(LlamaConfig(**sizes | fields)).to(dtype).eval()
        model.save_pretrained(tmp_path, max_shard_size=shard_size)
        return tmp_path, model

    return write


def engine_logits(path: Path, **settings: Any) -> torch.Tensor:
    engine = reference.load(EngineConfig(model_path=path, num_blocks=8, num_threads=1, **settings), quiet)
    return engine.logits_after_each_token(Row(TOKENS, 0, tuple(range(8)), len(TOKENS)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"shard_size": "40KB"},
        {"head_dim": 48},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": LLAMA3},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
    ids=["plain", "tied", "sharded", "own head size", "linear RoPE", "Llama 3 RoPE", "bfloat16", "float16"],
)
def test_logits_equal_those_of_transformers(write_checkpoint: WriteCheckpoint, fields: dict[str, Any]) -> None:
    path, _ = write_checkpoint(**fields)
    assert ("shard_size" in fields) == (path / "model.safetensors.index.json").exists()
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert engine_logits(path) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_quantised_on_load_it_runs_on_the_native_engine(write_checkpoint: WriteCheckpoint, name: str) -> None:
    path, _ = write_checkpoint(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="BF16.*quantise"):
        load_native(EngineConfig(model_path=path, num_blocks=8), quiet)
    native = load_native(EngineConfig(model_path=path, num_blocks=8, quantise=name, num_threads=1), quiet)
    row = Row(TOKENS, 0, tuple(range(8)), len(TOKENS), Sampling(position=len(TOKENS), seed=0))
    ours, expected = native.logits_after_each_token([row]), engine_logits(path, quantise=name)
    likeness = torch.nn.functional.cosine_similarity(ours, expected)
    assert float(likeness.mean()) > 0.995


@pytest.mark.parametrize("kind", ["F16", "Q5_0"])
def test_a_gguf_file_of_other_types_is_quantised_as_well(
    write_tiny_model: Callable[..., Path], tiny_shape: Callable[..., Any], kind: str
) -> None:
    sizes = {"hidden": 64, "head_dim": 32, "inner": 96, "weight_type": GGMLQuantizationType[kind]}
    path = write_tiny_model(tiny_shape(**sizes))
    native = load_native(EngineConfig(model_path=path, num_blocks=8, quantise="q8_0", num_threads=1), quiet)
    row = Row(TOKENS, 0, tuple(range(8)), len(TOKENS), Sampling(position=len(TOKENS), seed=0))
    likeness = torch.nn.functional.cosine_similarity(native.logits_after_each_token([row]), engine_logits(path))
    assert float(likeness.mean()) > 0.995


def test_what_is_quantised_and_what_stays_a_float(write_checkpoint: WriteCheckpoint) -> None:
    path, _ = write_checkpoint()
    kinds = {name: tensor.type.name for name, tensor in open_model(path, "q4_0").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    with pytest.raises(ModelError, match="the formats are q8_0"):
        open_model(path, "q3_k")


def test_the_positions_of_a_llama_3_model_are_exact_in_every_number_type(write_checkpoint: WriteCheckpoint) -> None:
    path, _ = write_checkpoint(rope_scaling=LLAMA3)
    config = EngineConfig(model_path=path, num_blocks=8, num_threads=1)
    exact, narrow = load_engine("reference", config, quiet), load_engine("torch", config, quiet)
    assert torch.equal(narrow.model.rotary.cos, exact.model.rotary.cos)


def test_auto_takes_the_reference_engine_for_floats(write_checkpoint: WriteCheckpoint) -> None:
    path, _ = write_checkpoint()
    assert (
        load_engine("auto", EngineConfig(model_path=path, num_blocks=8, num_threads=1), quiet).info.name == "reference"
    )
    config = EngineConfig(model_path=path, num_blocks=8, num_threads=1, quantise="q8_0")
    assert load_engine("auto", config, quiet).info.name == "native"


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "mamba"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModelError, "yarn"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9.0}}, ModelFileError, "impossible"),
        ({"rope_scaling": "yes"}, ModelFileError, "RoPE"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"num_attention_heads": 5}, ModelFileError, "5 heads"),
        ({"num_attention_heads": "4"}, ModelFileError, "not an integer"),
        ({"rms_norm_eps": None, "rope_theta": "big"}, ModelFileError, "not a number"),
        ({"hidden_size": None}, ModelFileError, "hidden_size"),
    ],
)
def test_what_is_not_supported_or_wrong_is_named(
    write_checkpoint: WriteCheckpoint, changes: dict[str, Any], kind: type[ModelError], words: str
) -> None:
    path, _ = write_checkpoint()
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(kind, match=words):
        engine_logits(path)


def test_a_missing_file_or_tensor_is_named(write_checkpoint: WriteCheckpoint) -> None:
    path, _ = write_checkpoint(shard_size="40KB")
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    for places, words in (
        ({"model.norm.weight": "../other.safetensors"}, "not a file of this directory"),
        ({"model.absent.weight": next(iter(described["weight_map"].values()))}, "model.absent.weight is missing"),
        ({"model.norm.weight": "gone.safetensors"}, "gone.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": described["weight_map"] | places}))
        with pytest.raises(ModelFileError, match=words):
            open_checkpoint(path)
    index.write_text("[]")
    with pytest.raises(ModelFileError, match="not a JSON object"):
        open_checkpoint(path)
    index.unlink()
    with pytest.raises(ModelFileError, match="safetensors files and no"):
        open_checkpoint(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelFileError, match="a checkpoint needs it"):
        open_checkpoint(path)


def test_foreign_tensors_are_refused_by_name(write_checkpoint: WriteCheckpoint) -> None:
    path, _ = write_checkpoint(tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UnsupportedModelError, match="blk.1"):
        engine_logits(path)


def test_a_gguf_model_written_as_a_checkpoint_gives_the_same_bits(
    tiny_model_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model_of(tied=False)
    assert torch.equal(engine_logits(export_checkpoint(path, tmp_path / "exported")), engine_logits(path))
