"""The KV pool of one engine: how many blocks, and the tensor that holds them.

Owns the keys and values of all sequences. Does not know which sequence owns which block: the caller passes
block tables.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_core.block_copies import BlockCopy, block_and_slot
from engine_core.config import ModelConfig
from engine_core.engine import EngineConfig
from engine_core.errors import ModelError, OutOfMemoryError

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
MEMORY_SHARE = 0.5
"""Share of the memory that is free to this process which an automatically sized pool takes."""
MAX_FULL_SEQUENCES = 64
"""An automatically sized pool holds at most this many sequences of the full length."""
UNKNOWN_MEMORY_BYTES = 2 << 30
"""Taken as free where the operating system does not say what is."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a pool will hold; a sequence of `max_model_len` tokens fits into it."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0


def plan_pool(
    config: EngineConfig, model: ModelConfig, token_bytes: int, available_bytes: int | None, *, on_host: bool = True
) -> PoolPlan:
    """Choose the number of blocks and the longest sequence.

    `on_host`: the pool is in host memory itself, so what is kept for evicted blocks is taken from `available_bytes`.

    `token_bytes`: bytes the pool holds per token, over all layers. The number of blocks comes from
    `config.num_blocks`, else `config.kv_cache_bytes`, else MEMORY_SHARE of `available_bytes`, at most
    MAX_FULL_SEQUENCES full sequences.

    Raises ModelError for a max_model_len above the model's context, OutOfMemoryError when the blocks do not
    fit into the memory or cannot hold one sequence of the max_model_len asked for. A max_model_len of 0
    shrinks to what fits.
    """
    if config.max_model_len > model.context_length:
        raise ModelError(
            f"max_model_len {config.max_model_len} exceeds the model's context of {model.context_length} "
            f"tokens; set it to at most {model.context_length}, or to 0 for the model's own"
        )
    wanted_len = config.max_model_len or model.context_length
    block_bytes = token_bytes * config.block_size
    num_host_blocks = config.num_host_blocks or config.host_kv_cache_bytes // block_bytes
    if config.host_kv_cache_bytes and not num_host_blocks:
        raise ModelError(
            f"host_kv_cache_bytes is {config.host_kv_cache_bytes}, but one block takes {block_bytes}; "
            "raise it, or set it to 0 to keep no evicted blocks"
        )
    if on_host and available_bytes is not None:
        if num_host_blocks * block_bytes > available_bytes:
            raise OutOfMemoryError(
                f"{num_host_blocks} host blocks take {num_host_blocks * block_bytes} bytes, but {available_bytes} are "
                "free; lower num_host_blocks or host_kv_cache_bytes, or give the process more memory"
            )
        available_bytes -= num_host_blocks * block_bytes
    num_blocks, reason = choose_num_blocks(config, block_bytes, wanted_len, available_bytes)
    if available_bytes is not None and num_blocks * block_bytes > available_bytes:
        raise OutOfMemoryError(
            f"{num_blocks} KV blocks take {num_blocks * block_bytes} bytes, but {available_bytes} are free; "
            "lower num_blocks or kv_cache_bytes, or give the process more memory"
        )
    max_model_len = min(wanted_len, num_blocks * config.block_size)
    if num_blocks < 1 or (config.max_model_len and max_model_len < wanted_len):
        raise OutOfMemoryError(
            f"{num_blocks} KV blocks of {config.block_size} tokens cannot hold a sequence of {wanted_len}; "
            "raise num_blocks or kv_cache_bytes, lower max_model_len, or give the process more memory"
        )
    log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB (%s); sequences of up to %d tokens",
        *(num_blocks, config.block_size, num_blocks * block_bytes / 2**20, reason, max_model_len),
    )
    if max_model_len < wanted_len:
        log.warning("max_model_len is %d instead of %d: the KV pool holds no more", max_model_len, wanted_len)
    if num_host_blocks:
        log.info("%d more blocks in host memory, %.1f MiB", num_host_blocks, num_host_blocks * block_bytes / 2**20)
    return PoolPlan(num_blocks, max_model_len, num_host_blocks)


def choose_num_blocks(
    config: EngineConfig, block_bytes: int, wanted_len: int, available_bytes: int | None
) -> tuple[int, str]:
    """The number of blocks and, for the log, where it comes from."""
    if config.num_blocks:
        return config.num_blocks, "num_blocks"
    if config.kv_cache_bytes:
        return config.kv_cache_bytes // block_bytes, "kv_cache_bytes"
    free_bytes = UNKNOWN_MEMORY_BYTES if available_bytes is None else available_bytes
    most = MAX_FULL_SEQUENCES * -(-wanted_len // config.block_size)
    fitting = int(free_bytes * MEMORY_SHARE) // block_bytes
    if fitting < most:
        return fitting, f"{MEMORY_SHARE:.0%} of {free_bytes / 2**20:.0f} MiB free memory"
    return most, f"{MAX_FULL_SEQUENCES} sequences of full length"


class KvPool:
    """Keys and values: `dtype` [layers, 2 (keys, values), num_blocks + 1, block_size, kv_heads, head_dim].

    The last block is scratch: no block table names it, so a warm-up may write there. All is zero at first,
    and on the CPU the system gives memory page by page as blocks are first written.

    `host`, of the same type, [num_host_blocks, layers, 2, block_size, kv_heads, head_dim] in host memory, keeps blocks
    that are copied out. CUDA: untested.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.block_size = block_size
        self.scratch_block = num_blocks
        shape = (model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
        try:
            self.tensor = (
                zeros_on_demand(shape, dtype) if device == CPU else torch.zeros(shape, dtype=dtype, device=device)
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemoryError(f"{num_blocks} KV blocks cannot be allocated; lower num_blocks") from error
        self.num_blocks = num_blocks
        host_shape = (num_host_blocks, model.num_layers, 2, *shape[3:])
        try:  # page-locked memory lets an accelerator copy by itself, in the order of its other work
            self.host = (
                zeros_on_demand(host_shape, dtype)
                if device == CPU and num_host_blocks
                else torch.zeros(host_shape, dtype=dtype, pin_memory=num_host_blocks > 0)
            )
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemoryError("the host's blocks cannot be allocated; lower host_kv_cache_bytes") from error

    def layer(self, index: int) -> Tensor:
        """One layer by slot (block x block_size + offset): [2, slots, kv_heads, head_dim]."""
        return self.tensor[index].flatten(1, 2)

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's keys and values [tokens, kv_heads, head_dim] at `slots` [tokens] int64."""
        stored_keys, stored_values = self.layer(index)
        stored_keys.index_copy_(0, slots, keys.to(stored_keys.dtype))
        stored_values.index_copy_(0, slots, values.to(stored_values.dtype))

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `engine_core.engine.Engine`."""
        for copy in copies:
            block, slot = block_and_slot(copy, self.num_blocks, len(self.host))
            in_pool, in_host = self.tensor[:, :, block], self.host[slot]
            if copy[0] == block:
                in_host.copy_(in_pool, non_blocking=True)
            else:
                in_pool.copy_(in_host, non_blocking=True)


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory yet: numpy leaves zero pages to the system, where torch.zeros writes every one."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)
