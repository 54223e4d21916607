"""The kernels as Python functions: the structures and signatures of `source/api.h`, and nothing else.

A `KernelLibrary` is loaded once per variant. Calls release the interpreter lock.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from engine_core.kernels.build import KernelsUnavailableError, library_for
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, best_instruction_set, cpu_flags

ABI_VERSION = 3


class Role(IntEnum):
    """Which matrix a tensor is."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    OUTPUT = 3
    GATE = 4
    UP = 5
    DOWN = 6
    EMBEDDING = 7
    HEAD = 8


class Norm(IntEnum):
    """Which norm's weights a vector is."""

    ATTENTION = 0
    FFN = 1
    FINAL = 2


class CacheKind(IntEnum):
    """How keys and values are stored."""

    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3

    def bytes_of(self, num_values: int) -> int:
        """Bytes that `num_values` keys and values take; INT8 adds a float scale for every 32."""
        return num_values * 9 // 8 if self is CacheKind.INT8 else num_values * (4 if self is CacheKind.F32 else 2)


class ModelShape(Structure):
    _fields_ = (
        *[
            (name, c_int32)
            for name in (
                *("num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "ffn_width", "vocab_size"),
                *("max_positions", "block_size", "num_blocks", "cache_kind", "num_threads"),
            )
        ],
        ("norm_epsilon", c_float),
    )


class Batch(Structure):
    """One step's input and output arrays; see nj_batch in `source/api.h`."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("tokens", c_void_p),
        ("num_sequences", c_int32),
        ("first_token", c_void_p),
        ("start", c_void_p),
        ("first_block", c_void_p),
        ("blocks", c_void_p),
        ("num_outputs", c_int32),
        ("output_tokens", c_void_p),
        ("logits_row", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("hidden", c_void_p),
    )


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "nj_abi_version": (c_int32, []),
    "nj_instruction_set": (c_char_p, []),
    "nj_model_create": (c_void_p, [POINTER(ModelShape), c_void_p]),
    "nj_model_destroy": (None, [c_void_p]),
    "nj_model_set_matrix": (c_int32, [c_void_p, *[c_int32] * 5, c_void_p]),
    "nj_model_set_norm": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "nj_model_step": (c_int32, [c_void_p, POINTER(Batch)]),
    "nj_model_block_bytes": (c_int64, [c_void_p]),
    "nj_model_copy_block": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "nj_multiply": (c_int32, [*[c_int32] * 4, c_void_p, c_void_p, c_void_p, c_int32]),
    "nj_quantise": (None, [c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "nj_exp2": (None, [c_int32, c_void_p, c_void_p]),
    "nj_silu": (None, [c_int32, c_void_p, c_void_p]),
    "nj_attend": (c_int32, [*[c_int32] * 8, c_void_p, c_int32, *[c_void_p] * 4]),
    "nj_measure_bandwidth": (c_double, [c_int32, c_int64]),
    "nj_measure_dot_products": (c_double, [c_int32]),
}
"""Function → (result, arguments)."""


def load_library(cache_dir: Path | None = None, instruction_set: str | None = None) -> ctypes.CDLL:
    """The kernels for this processor, or the variant asked for; compiled first if need be.

    Raises KernelsUnavailableError when the processor, or the lack of a compiler, forbids it.
    """
    path = library_for(variant_for(instruction_set), cache_dir)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"the native kernels in {path} cannot be loaded: {error}") from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.nj_abi_version() != ABI_VERSION:
        raise KernelsUnavailableError(f"the native kernels in {path} have another interface; delete the file")
    return library


def variant_for(instruction_set: str | None = None) -> InstructionSet:
    """The variant asked for, or the best one here. Raises KernelsUnavailableError when the processor cannot run it."""
    flags = cpu_flags()
    variant = INSTRUCTION_SETS[instruction_set] if instruction_set else best_instruction_set(flags)
    if variant is None or not variant.cpu_flags <= flags:
        raise KernelsUnavailableError(
            f"this processor has none of the instruction sets that the native kernels need "
            f"({', '.join(INSTRUCTION_SETS)}); use the reference engine"
        )
    return variant
