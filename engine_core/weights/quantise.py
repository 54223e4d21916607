"""Matrices as blocks of 32 values, made when they are read. Knows no model but the names of its embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize as quantize_blocks
from numpy.typing import NDArray

from engine_core.errors import ModelError, UnsupportedModelError
from engine_core.weights.gguf import GgufFile, GgufTensor

FORMATS: Mapping[str, GGMLQuantizationType] = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_1": GGMLQuantizationType.Q4_1,
}
"""Name of a format → its type: 8 or 4 bits and a scale per 32 values, q4_1 with a minimum as well."""

EIGHT_BIT = frozenset({"token_embd.weight", "output.weight"})
"""Embedding and head keep 8 bits in every format: they are read by row, and the last logits suffer most."""


def quantised(file: GgufFile, name: str) -> GgufFile:
    """The same model with its matrices in the format `name`; one that has any of these formats already stays as it is.

    Raises ModelError for an unknown format, UnsupportedModelError for a matrix whose rows are no multiple of 32.
    """
    if name not in FORMATS:
        raise ModelError(f"there is no format {name!r} to quantise to; the formats are {', '.join(FORMATS)}")
    tensors = {key: quantised_tensor(file, tensor, name) for key, tensor in file.tensors.items()}
    return replace(file, tensors=tensors)


def quantised_tensor(file: GgufFile, tensor: GgufTensor, name: str) -> GgufTensor:
    if tensor.type in FORMATS.values() or len(tensor.shape) != 2:
        return tensor
    kind = GGMLQuantizationType.Q8_0 if tensor.name in EIGHT_BIT else FORMATS[name]
    block_values, _ = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block_values:
        raise UnsupportedModelError(
            f"{file.path}: rows of {tensor.name} have {tensor.shape[-1]} values, not a multiple of {block_values}; "
            "run it without quantising"
        )
    return GgufTensor(tensor.name, kind, tensor.shape, partial(blocks_of, tensor, kind))


def blocks_of(tensor: GgufTensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    return np.ascontiguousarray(quantize_blocks(tensor.dequantized(), kind), dtype=np.uint8).reshape(-1)
