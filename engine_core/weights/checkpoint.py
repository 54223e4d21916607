"""A Hugging Face checkpoint (a directory with config.json and *.safetensors), presented in GGUF's terms.

So the engines know one format: metadata under GGUF's keys, tensors under GGUF's names, and the rows of query and key
weights in GGUF's order, which has the two members of a rotated pair as neighbours. The Llama architecture is known.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.weights.gguf import REMEDY, GgufFile, GgufTensor, Scalar
from engine_core.weights.safetensors import SafeTensor, open_safetensors

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MODEL_TYPES = {"llama": "llama"}
"""`model_type` of config.json → architecture in GGUF's terms."""

TYPES = {
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "BF16": GGMLQuantizationType.BF16,
}

WHOLE_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_PREFIX = "model.layers."
DERIVED = ".rotary_emb.inv_freq"
"""Ends the names of tensors that follow from the configuration."""


class CheckpointConfig:
    """config.json with typed access; a value of another type is a ModelFileError."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise ModelFileError(f"{self.path}: {key} is {value!r}, not an integer; {REMEDY}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFileError(f"{self.path}: {key} is {value!r}, not a number; {REMEDY}")
        return float(value)

    def rope(self) -> "CheckpointConfig":
        """What is said of RoPE: `rope_parameters`, or `rope_scaling` of older files; empty for none."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ModelFileError(f"{self.path}: the RoPE parameters are {given!r}, not an object; {REMEDY}")
        return CheckpointConfig(self.path, given)


def open_checkpoint(directory: Path) -> GgufFile:
    """Read the configuration and map the tensors.

    Raises ModelFileError (a file is missing or corrupt), UnsupportedModelError (another architecture, or one of its
    features that no engine here runs).
    """
    config = CheckpointConfig(directory / CONFIG, read_json(directory / CONFIG))
    refuse_unsupported(config)
    stored = read_tensors(directory)
    heads = {"attn_q": config.integer("num_attention_heads")}
    heads["attn_k"] = config.integer("num_key_value_heads", heads["attn_q"])
    tensors: dict[str, GgufTensor] = {}
    is_tied = config.values.get("tie_word_embeddings", False) is True
    for name, tensor in stored.items():
        if not name.endswith(DERIVED) and not (is_tied and name == "lm_head.weight"):
            renamed = gguf_name(name)
            tensors[renamed] = as_gguf(directory, renamed, tensor, heads)
    if (factors := rotary_factors(config)) is not None:
        data = factors.view(np.uint8)
        tensors["rope_freqs.weight"] = GgufTensor(
            "rope_freqs.weight", GGMLQuantizationType.F32, factors.shape, lambda: data
        )
    return GgufFile(directory, 0, metadata_of(directory, config), tensors, None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the checkpoint. Raises ModelFileError."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file; a checkpoint needs it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not readable as JSON; {REMEDY}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: not a JSON object; {REMEDY}")
    return values


def refuse_unsupported(config: CheckpointConfig) -> None:
    values, path = config.values, config.path
    if (model_type := values.get("model_type")) not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r} is not supported; use a model of one of: {known}"
        )
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if values.get(key):
            raise UnsupportedModelError(f"{path}: {key} is not supported; use a model without it")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act {activation!r} is not supported; use a model with silu")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{path}: RoPE over a part of the head is not supported; use another model")


def metadata_of(directory: Path, config: CheckpointConfig) -> dict[str, Any]:
    """The hyperparameters under GGUF's keys."""
    architecture = MODEL_TYPES[config.values["model_type"]]
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    rope = config.rope()
    values: dict[str, Scalar] = {
        "block_count": config.integer("num_hidden_layers"),
        "embedding_length": hidden_size,
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": num_heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", num_heads),
        "attention.key_length": config.integer("head_dim", hidden_size // max(num_heads, 1)),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6),
        "context_length": config.integer("max_position_embeddings"),
        "rope.freq_base": rope.number("rope_theta", config.number("rope_theta", 10000.0)),
        "rope.scaling.type": rope_type(config, rope),
    }
    if values["rope.scaling.type"] == "linear":
        values["rope.scaling.factor"] = rope.number("factor")
    general = {"general.architecture": architecture, "general.name": directory.name}
    return general | {f"{architecture}.{key}": value for key, value in values.items()}


def rope_type(config: CheckpointConfig, rope: CheckpointConfig) -> str:
    """How positions are scaled, in GGUF's terms; "llama3" is there a tensor of factors."""
    named = rope.values.get("rope_type", rope.values.get("type", "default"))
    kinds = {"default": "none", "llama3": "none", "linear": "linear"}
    if named not in kinds:
        raise UnsupportedModelError(f"{config.path}: RoPE scaling {named!r} is not supported; use another model")
    return kinds[named]


def rotary_factors(config: CheckpointConfig) -> NDArray[np.float32] | None:
    """What divides the frequencies of a Llama 3 model, float32 [head_dim / 2]; None for other models.

    Long wavelengths are stretched by `factor`, short ones not, those between in part (Grattafiori et al., "The Llama 3
    Herd of Models", 2024, and the model's reference code).
    """
    rope = config.rope()
    if rope.values.get("rope_type", rope.values.get("type")) != "llama3":
        return None
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // max(num_heads, 1))
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    trained = rope.number("original_max_position_embeddings")
    if min(factor, low, trained, theta) <= 0 or high <= low:
        raise ModelFileError(f"{config.path}: the RoPE parameters are impossible; {REMEDY}")
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def read_tensors(directory: Path) -> dict[str, SafeTensor]:
    """All tensors of the checkpoint, of one file or of the several that its index names."""
    if not (directory / INDEX).exists():
        return open_safetensors(only_file(directory))
    places = read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(type(file) is str for file in places.values()):
        raise ModelFileError(f"{directory / INDEX}: weight_map is missing or wrong; {REMEDY}")
    if foreign := [file for file in places.values() if Path(file).name != file]:
        raise ModelFileError(f"{directory / INDEX}: {foreign[0]!r} is not a file of this directory; {REMEDY}")
    shards = {file: open_safetensors(directory / file) for file in sorted(set(places.values()))}
    if missing := sorted(name for name, file in places.items() if name not in shards[file]):
        raise ModelFileError(f"{directory / places[missing[0]]}: tensor {missing[0]} is missing; {REMEDY}")
    return {name: shards[file][name] for name, file in places.items()}


def only_file(directory: Path) -> Path:
    """The file of a checkpoint without an index."""
    files = [directory / SINGLE] if (directory / SINGLE).exists() else sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelFileError(f"{directory}: {len(files)} safetensors files and no {INDEX}; {REMEDY}")
    return files[0]


def gguf_name(name: str) -> str:
    """The tensor's name in GGUF's terms; an unknown one stays, and will be refused by it."""
    if not name.startswith(LAYER_PREFIX):
        return WHOLE_MODEL.get(name, name)
    layer, _, part = name.removeprefix(LAYER_PREFIX).partition(".")
    renamed = OF_A_LAYER.get(part.removesuffix(".weight"))
    return name if renamed is None or not part.endswith(".weight") else f"blk.{layer}.{renamed}.weight"


def as_gguf(directory: Path, name: str, tensor: SafeTensor, heads: Mapping[str, int]) -> GgufTensor:
    """The tensor, with the rows of queries and keys in GGUF's order. Raises UnsupportedModelError, ModelFileError."""
    if tensor.type not in TYPES:
        known = ", ".join(TYPES)
        raise UnsupportedModelError(f"{directory}: tensor {name} has type {tensor.type}, not one of {known}")
    num_heads = heads.get(name.rpartition(".weight")[0].rpartition(".")[2])
    read = partial(np.asarray, tensor.data)
    result = GgufTensor(name, TYPES[tensor.type], tensor.shape, read)
    if len(tensor.data) != result.size_bytes or not tensor.shape or 0 in tensor.shape:
        raise ModelFileError(f"{directory}: tensor {name} has {len(tensor.data)} bytes for {tensor.shape}; {REMEDY}")
    if num_heads is None:
        return result
    if num_heads < 1 or tensor.shape[0] % (2 * num_heads):
        raise ModelFileError(
            f"{directory}: tensor {name} of shape {list(tensor.shape)} has no {num_heads} heads; {REMEDY}"
        )
    return GgufTensor(name, result.type, result.shape, partial(in_pairs, tensor.data, tensor.shape[0], num_heads))


def in_pairs(data: NDArray[np.uint8], num_rows: int, num_heads: int) -> NDArray[np.uint8]:
    """Reorder each head's rows from halves (all first members of rotated pairs, then all second ones) to pairs."""
    halves = data.reshape(num_heads, 2, num_rows // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)
