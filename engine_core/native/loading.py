"""From a GGUF file to a native engine: checks that the kernels can run it, and hands them the tensors.

The kernels repack every matrix into their own layout; the file's mapping is closed afterwards, so the weights are in
memory once.
"""

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from engine_core.config import ModelConfig
from engine_core.engine import EngineConfig, EngineInfo, Progress
from engine_core.errors import ModelError, ModelFileError, OutOfMemoryError, UnsupportedModelError
from engine_core.kernels.binding import CacheKind, ModelShape, Norm, Role, load_library, variant_for
from engine_core.kernels.build import check_obtainable
from engine_core.kv_cache import PoolPlan, plan_pool
from engine_core.limits import available_memory_bytes, usable_cores
from engine_core.models import read_supported_config
from engine_core.native.engine import NativeEngine
from engine_core.native.step_arrays import Float32s
from engine_core.weights.gguf import GgufFile, GgufTensor
from engine_core.weights.opening import open_model

log = logging.getLogger(__name__)

ARCHITECTURES = ("llama",)
PACKED_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}
"""Types of matrices that the kernels take → bits per weight, which decide the layout."""
VECTOR_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
MULTIPLE = 32
MAX_HEAD_DIM = 256
BLOCK_SIZE_MULTIPLE = 16
MAX_THREADS = 64

CACHE_KINDS: dict[str, CacheKind] = {
    "auto": CacheKind.INT8,
    "int8": CacheKind.INT8,
    "bfloat16": CacheKind.BF16,
    "float16": CacheKind.F16,
    "float32": CacheKind.F32,
}
"""Name of a number type for keys and values → how the kernels keep them."""

LAYER_MATRICES: dict[str, Role] = {
    "attn_q": Role.QUERY,
    "attn_k": Role.KEY,
    "attn_v": Role.VALUE,
    "attn_output": Role.OUTPUT,
    "ffn_gate": Role.GATE,
    "ffn_up": Role.UP,
    "ffn_down": Role.DOWN,
}
SAME_BITS = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
"""Matrices of a layer that are multiplied as one and so must share a layout."""
LAYER_NORMS: dict[str, Norm] = {"attn_norm": Norm.ATTENTION, "ffn_norm": Norm.FFN}


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """What only this engine can be told.

    `cache_kind`: how keys and values are stored; INT8 costs about 0.0005 nats per token against the others and half the
    memory, and with it half the time of reading them. `instruction_set` None takes the best this processor has;
    `kernel_cache_dir` None is `engine_core.kernels.build.default_cache_dir()`.
    """

    cache_kind: CacheKind = CacheKind.INT8
    instruction_set: str | None = None
    kernel_cache_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor and its place in the model."""

    tensor: GgufTensor
    role: Role
    layer: int


def options_of(config: EngineConfig) -> NativeOptions:
    """What `config` asks of this engine. Raises ModelError for what it has not."""
    if config.device not in ("auto", "cpu") or (config.dtype, config.attention) != ("auto", "auto"):
        raise ModelError(
            "the native engine runs on the CPU, in number types of its own; leave device, dtype and attention at auto, "
            "or choose the engine torch"
        )
    if config.kv_dtype not in CACHE_KINDS:
        raise ModelError(f"kv_dtype {config.kv_dtype!r} is not one of the native engine's: {', '.join(CACHE_KINDS)}")
    return NativeOptions(CACHE_KINDS[config.kv_dtype], kernel_cache_dir=config.kernel_cache_dir)


def load(config: EngineConfig, progress: Progress, options: NativeOptions | None = None) -> NativeEngine:
    """Load the model at `config.model_path`, by `options` or else by what `config` says of them.

    Raises KernelsUnavailableError where the kernels cannot run, UnsupportedModelError for a model that they cannot run
    (the reference engine may), and the other kinds of ModelError.
    """
    options = options or options_of(config)
    progress("kernels", 0.0)
    library = load_library(options.kernel_cache_dir, options.instruction_set)
    progress("open", 0.0)
    file, model_config, plan = prepare(config, options)
    info = EngineInfo(
        name="native",
        model=model_config.name,
        vocab_size=model_config.vocab_size,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        device="cpu",
        kernels=library.nj_instruction_set().decode(),
        embedding_size=model_config.hidden_size,
        num_host_blocks=plan.num_host_blocks,
    )
    threads = min(config.num_threads or usable_cores(), MAX_THREADS)
    log.info(
        "native engine: %s kernels, %d threads, %s keys and values", info.kernels, threads, options.cache_kind.name
    )
    shape = shape_of(model_config, info, options.cache_kind, threads)
    frequencies = rotary_frequencies(file, model_config)
    model = library.nj_model_create(ctypes.byref(shape), frequencies.ctypes.data)
    if not model:
        raise OutOfMemoryError(f"{file.path}: the KV pool cannot be allocated; lower num_blocks or kv_cache_bytes")
    engine = NativeEngine(library, model, info)
    hand_over_weights(library, model, file, model_config, progress)
    return engine


def check(config: EngineConfig) -> str:
    """What would compute here, for a person; a model is looked at where `config` names one, but not loaded.

    Raises what `load` would, except when it is compiling, loading weights or allocating that fails.
    """
    options = options_of(config)
    variant = variant_for(options.instruction_set)
    check_obtainable(variant)
    if config.model_path is not None:
        prepare(config, options)
    return f"the native engine, {variant.name} kernels, {options.cache_kind.name} keys and values"


def prepare(config: EngineConfig, options: NativeOptions) -> tuple[GgufFile, ModelConfig, PoolPlan]:
    """Open the model, check that the kernels can run it and that it fits; loads nothing of it. Raises ModelError."""
    if config.model_path is None:
        raise ModelFileError("the native engine needs model_path: the path of a .gguf file or of a checkpoint")
    file = open_model(config.model_path, config.quantise)
    model_config = read_supported_config(file)
    check_supported(file, model_config, config.block_size)
    token_bytes = options.cache_kind.bytes_of(model_config.kv_floats_per_token)
    return file, model_config, plan_pool(config, model_config, token_bytes, memory_beside_weights(file))


def shape_of(model: ModelConfig, info: EngineInfo, cache_kind: CacheKind, threads: int) -> ModelShape:
    return ModelShape(
        num_layers=model.num_layers,
        width=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_width=model.intermediate_size,
        vocab_size=model.vocab_size,
        max_positions=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks + 1,  # the last is scratch for the warm-up
        cache_kind=cache_kind,
        num_threads=threads,
        norm_epsilon=model.rms_eps,
    )


def check_supported(file: GgufFile, model: ModelConfig, block_size: int) -> None:
    """Raise UnsupportedModelError for what the kernels cannot run."""
    reasons = list(unsupported(file, model, block_size))
    if reasons:
        raise UnsupportedModelError(f"{file.path}: the native engine cannot run this model: {'; '.join(reasons)}")


def unsupported(file: GgufFile, model: ModelConfig, block_size: int) -> Iterator[str]:
    if model.architecture not in ARCHITECTURES:
        yield f"architecture {model.architecture!r} is not one of {', '.join(ARCHITECTURES)}"
    if block_size % BLOCK_SIZE_MULTIPLE:
        yield f"block_size {block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
    if model.head_dim > MAX_HEAD_DIM:
        yield f"head dimension {model.head_dim} is above {MAX_HEAD_DIM}"
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(model, name) % MULTIPLE:
            yield f"{name} {getattr(model, name)} is not a multiple of {MULTIPLE}"
    known = set(expected_tensors(model))
    if foreign := sorted(set(file.tensors) - known):
        yield f"{len(foreign)} tensors have no place in it, {foreign[0]} first"
    for matrix in matrices(file, model):
        if matrix.tensor.type not in PACKED_BITS:
            kind = matrix.tensor.type.name
            yield f"{matrix.tensor.name} has type {kind}, not Q4_0, Q4_1 or Q8_0 (quantise brings it into one)"
            return
    for layer in range(model.num_layers):
        for group in SAME_BITS:
            if len({PACKED_BITS[file.tensor(f"blk.{layer}.{name}.weight").type] for name in group}) > 1:
                yield f"{', '.join(group)} of layer {layer} mix 4-bit and 8-bit types"
                return


def expected_tensors(model: ModelConfig) -> Iterator[str]:
    yield from ("token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight")
    for layer in range(model.num_layers):
        yield from (f"blk.{layer}.{name}.weight" for name in (*LAYER_MATRICES, *LAYER_NORMS))


def matrices(file: GgufFile, model: ModelConfig) -> Iterator[Matrix]:
    yield Matrix(file.tensor("token_embd.weight"), Role.EMBEDDING, 0)
    if not model.tied_embeddings:
        yield Matrix(file.tensor("output.weight"), Role.HEAD, 0)
    for layer in range(model.num_layers):
        for name, role in LAYER_MATRICES.items():
            yield Matrix(file.tensor(f"blk.{layer}.{name}.weight"), role, layer)


def hand_over_weights(
    library: ctypes.CDLL, model: int, file: GgufFile, config: ModelConfig, progress: Progress
) -> None:
    """Give every tensor to the kernels. Raises ModelFileError for a wrong shape."""
    everything = list(matrices(file, config))
    for index, matrix in enumerate(everything):
        tensor = matrix.tensor
        data = tensor.data  # held here: it may have been made for this call
        if len(tensor.shape) != 2 or library.nj_model_set_matrix(
            model, matrix.role, matrix.layer, int(tensor.type), *tensor.shape, data.ctypes.data
        ):
            raise ModelFileError(f"{file.path}: tensor {tensor.name} has the wrong shape {list(tensor.shape)}")
        progress("weights", (index + 1) / len(everything))
    library.nj_model_set_norm(model, Norm.FINAL, 0, vector(file, "output_norm.weight", config.hidden_size).ctypes.data)
    for layer in range(config.num_layers):
        for name, norm in LAYER_NORMS.items():
            weights = vector(file, f"blk.{layer}.{name}.weight", config.hidden_size)
            library.nj_model_set_norm(model, norm, layer, weights.ctypes.data)


def vector(file: GgufFile, name: str, length: int) -> Float32s:
    tensor = file.tensor(name)
    if tensor.shape != (length,) or tensor.type not in VECTOR_TYPES:
        raise ModelFileError(
            f"{file.path}: tensor {name} has shape {list(tensor.shape)} and type {tensor.type.name}, "
            f"expected {length} floats"
        )
    return np.ascontiguousarray(tensor.dequantized(), dtype=np.float32)


def rotary_frequencies(file: GgufFile, model: ModelConfig) -> Float32s:
    """Angle per position of each pair of a head, float32 [head_dim / 2]."""
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents / model.rope_scale
    if "rope_freqs.weight" in file.tensors:
        frequencies /= vector(file, "rope_freqs.weight", model.head_dim // 2)
    return frequencies.astype(np.float32)


def memory_beside_weights(file: GgufFile) -> int | None:
    """Memory left once the weights are packed; None if unknown. Raises OutOfMemoryError when they do not fit."""
    available = available_memory_bytes()
    if available is None:
        return None
    weight_bytes = sum(tensor.size_bytes for tensor in file.tensors.values()) * 11 // 10  # Q4_0 grows by a ninth
    if weight_bytes > available:
        raise OutOfMemoryError(
            f"{file.path}: the weights take {weight_bytes} bytes, but {available} are free; "
            "use a smaller model or give the process more memory"
        )
    return available - weight_bytes
