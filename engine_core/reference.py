"""The reference engine: the model in plain float32 torch, row-independent and easy to read; and the torch engine.

Every faster engine is checked against the reference. The torch engine is the same code on another device, in another
number type, with another attention kernel; it runs wherever torch does. CUDA: untested.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.attention.paged import Span, span_in_pool
from engine_core.batch import Row, Sampled, Sampling, Scored
from engine_core.block_copies import BlockCopy
from engine_core.config import ModelConfig
from engine_core.engine import EngineConfig, EngineInfo, Progress
from engine_core.errors import ModelFileError
from engine_core.kv_cache import KvPool, PoolPlan, plan_pool
from engine_core.limits import usable_cores
from engine_core.models import MODELS, read_supported_config
from engine_core.models.llama import LlamaModel
from engine_core.row_checks import check_rows
from engine_core.sampling import pieces_of, sample, score
from engine_core.torch_options import TorchOptions, memory_beside_weights, reference_options, torch_options
from engine_core.weights.gguf import GgufFile
from engine_core.weights.named_tensors import NamedTensors
from engine_core.weights.opening import open_model

log = logging.getLogger(__name__)


class ReferenceEngine:
    """Rows in, tokens out; use from the thread that loaded it."""

    def __init__(self, model: LlamaModel, pool: KvPool, info: EngineInfo) -> None:
        self.model = model
        self.pool = pool
        self._info = info

    @property
    def info(self) -> EngineInfo:
        return self._info

    def warm_up(self) -> None:
        """One prompt and one decode step in the pool's scratch block, which no block table names."""
        count = self.pool.block_size
        sampling = Sampling(position=count, seed=0)
        self.logits([Row((0,) * count, 0, (self.pool.scratch_block,), count, sampling)])
        self.logits([Row((0,), count - 1, (self.pool.scratch_block,), count, sampling)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `engine_core.engine.Engine`."""
        self.pool.copy_blocks(copies)

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `engine_core.engine.Engine`. Raises ValueError, nothing written, for rows that do not fit."""
        check_rows(rows, self._info)
        specs = [row.sampling for row in rows if row.sampling is not None]
        sampled = iter(sample(self.logits(rows), specs))
        return [None if row.sampling is None else next(sampled) for row in rows]

    def score(self, row: Row) -> Scored:
        """See `engine_core.engine.Engine`."""
        check_rows([row], self._info)
        return score(((piece, self.logits_after_each_token(piece)) for piece in pieces_of(row)), row)

    @torch.inference_mode()
    def logits_after_each_token(self, row: Row) -> Tensor:
        """Run one row → float32 [its tokens, vocab]."""
        hidden = self._hidden([row], spans_of([row], self.pool))
        return self.model.logits(hidden[: len(row.tokens)]).cpu()  # behind them is padding

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Run rows through the model → float32 [rows with `sampling`, vocab], after their last tokens."""
        if not rows:
            return torch.empty(0, self._info.vocab_size)
        spans = spans_of(rows, self.pool)
        hidden = self._hidden(rows, spans)
        sampling = [
            span.first + span.count - 1 for row, span in zip(rows, spans, strict=True) if row.sampling is not None
        ]
        return self.model.logits(hidden[sampling]) if sampling else torch.empty(0, self._info.vocab_size)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """See `engine_core.engine.Engine`."""
        check_rows(rows, self._info)
        spans = spans_of(rows, self.pool)
        normed = self.model.normed(self._hidden(rows, spans)).float().cpu()
        return [
            normed[span.first + (span.count - 1 if row.hidden == "last" else 0) : span.first + span.count].numpy()
            for row, span in zip(rows, spans, strict=True)
        ]

    def _hidden(self, rows: Sequence[Row], spans: list[Span]) -> Tensor:
        device = self.pool.tensor.device
        tokens = torch.tensor([token for row in rows for token in row.tokens], device=device)
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)
        return self.model.hidden_states(tokens, positions, spans, self.pool)


def spans_of(rows: Sequence[Row], pool: KvPool) -> list[Span]:
    """Lay the rows' tokens one after another."""
    spans: list[Span] = []
    first = 0
    for row in rows:
        count = len(row.tokens)
        spans.append(span_in_pool(first, count, row.start, row.blocks, pool.block_size, pool.tensor.device))
        first += count
    return spans


def load(config: EngineConfig, progress: Progress) -> ReferenceEngine:
    """Load the model at `config.model_path` in float32 on the CPU. Raises ModelError and its kinds (see
    engine_core/errors.py).
    """
    return load_with(config, progress, "reference", reference_options(config))


def load_torch(config: EngineConfig, progress: Progress) -> ReferenceEngine:
    """Load the model at `config.model_path` on the device and in the number type that `config` asks for.

    Tested on the CPU. CUDA: untested. Raises ModelError and its kinds.
    """
    return load_with(config, progress, "torch", torch_options(config))


def check(config: EngineConfig) -> str:
    """What would compute here, for a person; a model is looked at where `config` names one, but not loaded.

    Raises what `load` would, except when it is loading weights or allocating that fails.
    """
    return check_with(config, "reference", reference_options(config))


def check_torch(config: EngineConfig) -> str:
    """As `check`, for `load_torch`."""
    return check_with(config, "torch", torch_options(config))


def check_with(config: EngineConfig, name: str, options: TorchOptions) -> str:
    if config.model_path is not None:
        prepare(config, name, options)
    return f"the {name} engine on {options.device}, {options.describe()}"


def prepare(config: EngineConfig, name: str, options: TorchOptions) -> tuple[GgufFile, ModelConfig, PoolPlan]:
    """Open the model and check that it can run and fits; nothing of it is loaded. Raises ModelError."""
    if config.model_path is None:
        raise ModelFileError(f"the {name} engine needs model_path: the path of a .gguf file or of a checkpoint")
    file = open_model(config.model_path, config.quantise)
    model_config = read_supported_config(file)
    num_weights = sum(tensor.num_values for tensor in file.tensors.values())
    available_bytes = memory_beside_weights(options, num_weights, str(file.path))
    token_bytes = model_config.kv_floats_per_token * options.kv_dtype.itemsize
    on_host = options.device.type == "cpu"
    return file, model_config, plan_pool(config, model_config, token_bytes, available_bytes, on_host=on_host)


def load_with(config: EngineConfig, progress: Progress, name: str, options: TorchOptions) -> ReferenceEngine:
    progress("open", 0.0)
    torch.set_num_threads(config.num_threads or usable_cores())
    file, model_config, plan = prepare(config, name, options)
    model = load_model(file, model_config, plan.max_model_len, progress, options)
    progress("kv_pool", 0.0)
    pool = KvPool(
        model_config,
        plan.num_blocks,
        config.block_size,
        num_host_blocks=plan.num_host_blocks,
        dtype=options.kv_dtype,
        device=options.device,
    )
    progress("kv_pool", 1.0)
    info = EngineInfo(
        name=name,
        model=model_config.name,
        vocab_size=model_config.vocab_size,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        device=str(options.device),
        kernels=options.describe(),
        embedding_size=model_config.hidden_size,
        num_host_blocks=plan.num_host_blocks,
    )
    return ReferenceEngine(model, pool, info)


def load_model(
    file: GgufFile, config: ModelConfig, max_positions: int, progress: Progress, options: TorchOptions
) -> LlamaModel:
    tensors = NamedTensors(
        file, lambda fraction: progress("weights", fraction), dtype=options.dtype, device=options.device
    )
    with torch.inference_mode():
        model = MODELS[config.architecture](config, tensors, max_positions, options)
    if model.tile_rows == 1:
        log.warning("rows of a tile differ in bits on this processor: computing row by row, which is slow")
    return model
