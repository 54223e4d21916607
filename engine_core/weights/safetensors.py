"""The safetensors format: which tensors a file holds, and where. Knows no model.

A file is the length of its header (8 bytes), the header in JSON, and the tensors' bytes; see
https://github.com/huggingface/safetensors. Every number in the file is distrusted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import ModelFileError
from engine_core.weights.gguf import REMEDY, map_file

MAX_HEADER_BYTES = 100 << 20
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor: its type as the file names it (F32, BF16, …), its shape, and its memory-mapped bytes."""

    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def open_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Map the file and read its header. Raises ModelFileError (missing, truncated, corrupt)."""
    whole = np.frombuffer(map_file(path), dtype=np.uint8)
    header_bytes = int.from_bytes(whole[:LENGTH_BYTES].tobytes(), "little")
    begin = LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or begin > len(whole):
        raise ModelFileError(f"{path}: the file ends inside its header: truncated or no safetensors file; {REMEDY}")
    try:
        header = json.loads(whole[LENGTH_BYTES:begin].tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header is not JSON: no safetensors file, or corrupt; {REMEDY}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the header is not a JSON object; {REMEDY}")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _tensor(path, name, entry, whole[begin:]) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, data: NDArray[np.uint8]) -> SafeTensor:
    if not isinstance(entry, Mapping):
        raise ModelFileError(f"{path}: tensor {name} is not described; {REMEDY}")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(place) and len(place) == 2):
        raise ModelFileError(f"{path}: tensor {name} is described wrongly; {REMEDY}")
    begin, end = place
    if not begin <= end <= len(data):
        raise ModelFileError(f"{path}: truncated: tensor {name} ends at byte {end} of {len(data)}; {REMEDY}")
    if (end - begin) % max(math.prod(shape), 1):
        raise ModelFileError(f"{path}: tensor {name} has {end - begin} bytes for shape {shape}; {REMEDY}")
    return SafeTensor(dtype, tuple(shape), data[begin:end])


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
