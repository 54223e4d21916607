"""What the torch engines run on: device, number types and attention kernel, from names to torch's own objects."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_core.attention import ATTENTION_KERNELS
from engine_core.engine import EngineConfig
from engine_core.errors import ModelError, OutOfMemoryError
from engine_core.layers.row_tiles import TILE_ROWS
from engine_core.limits import available_memory_bytes

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

ACCELERATOR_TILE_ROWS = 64
"""An accelerator is not full with fewer."""


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Where and how a model is computed; `kv_dtype` is how keys and values are kept, `attention` a kernel's name."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention: str

    @property
    def tile_rows(self) -> int:
        """Rows of the tiles that dense parts run in (see layers/row_tiles.py)."""
        return TILE_ROWS if self.device.type == "cpu" else ACCELERATOR_TILE_ROWS

    def describe(self) -> str:
        """What computes, for a person."""
        kinds = [str(kind).removeprefix("torch.") for kind in (self.dtype, self.kv_dtype)]
        kept = "" if kinds[0] == kinds[1] else f", {kinds[1]} keys and values"
        return f"torch {kinds[0]}, {self.attention} attention{kept}"

    def available_bytes(self) -> int | None:
        """Memory for weights and KV pool on the device; None if unknown."""
        if self.device.type == "cpu":
            return available_memory_bytes()
        return int(torch.cuda.mem_get_info(self.device)[0])


def reference_options(config: EngineConfig) -> TorchOptions:
    """Float32 on the CPU, as this engine is the measure of the others. Raises ModelError for any other wish."""
    wishes = {
        "device": (config.device, "cpu"),
        "dtype": (config.dtype, "float32"),
        "attention": (config.attention, "tiled"),
    }
    for name, (wish, only) in wishes.items():
        if wish not in ("auto", only):
            raise ModelError(f"the reference engine has {name} {only}, not {wish}; choose the engine torch for that")
    return TorchOptions(torch.device("cpu"), torch.float32, kv_dtype_of(config, torch.float32), "tiled")


def torch_options(config: EngineConfig) -> TorchOptions:
    """The device asked for, by default an accelerator where there is one; by default bfloat16 and torch's own kernel.

    Raises ModelError for a device that is not here, or an unknown name.
    """
    device = device_of(config.device)
    dtype = torch.bfloat16 if config.dtype == "auto" else dtype_called(config.dtype, "dtype")
    attention = "sdpa" if config.attention == "auto" else config.attention
    if attention not in ATTENTION_KERNELS:
        raise ModelError(f"there is no attention {attention!r}; the kernels are {', '.join(ATTENTION_KERNELS)}")
    return TorchOptions(device, dtype, kv_dtype_of(config, dtype), attention)


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"there is no device {name!r}; give cpu, cuda or cuda:NUMBER") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not here: {torch.cuda.device_count()} CUDA devices; choose cpu or auto")
    return device


def kv_dtype_of(config: EngineConfig, own: torch.dtype) -> torch.dtype:
    return own if config.kv_dtype == "auto" else dtype_called(config.kv_dtype, "kv_dtype")


def dtype_called(name: str, option: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"{option} {name!r} is not one of torch's engines'; they have {', '.join(DTYPES)}")
    return DTYPES[name]


def memory_beside_weights(options: TorchOptions, num_values: int, name: str) -> int | None:
    """Memory left once so many weights are in it; None if unknown. Raises OutOfMemoryError when they do not fit."""
    available = options.available_bytes()
    if available is None:
        return None
    weight_bytes = options.dtype.itemsize * num_values
    if weight_bytes > available:
        kind = str(options.dtype).removeprefix("torch.")
        raise OutOfMemoryError(
            f"{name}: the weights take {weight_bytes} bytes as {kind}, but {available} are free; "
            "use a smaller model or give the process more memory"
        )
    return available - weight_bytes
