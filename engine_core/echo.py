"""The echo engine: no model, no torch. Says the prompt again and again, at a chosen pace.

For tests and for measuring everything but the model. Tokens are kept in a pool addressed by block tables like
keys and values are, and answers are read back through the row's own table: a wrong table, or a block given to
two sequences, shows as wrong tokens.
"""

import time
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_core.batch import NO_TOKEN, NOTHING_ALLOWED, Row, Sampled, Sampling, Scored
from engine_core.block_copies import BlockCopy, block_and_slot
from engine_core.engine import EngineConfig, EngineInfo, Progress
from engine_core.errors import ModelError, OutOfMemoryError
from engine_core.row_checks import check_rows

DEFAULT_MODEL_LEN = 8192
DEFAULT_FULL_SEQUENCES = 64
TOKEN_BYTES = 4
NOTHING_WRITTEN = NO_TOKEN
"""Content of a slot never written, and so what a wrong table may say."""


class EchoEngine:
    """Generated token g of a sequence is prompt[g % len(prompt)], with probability 1."""

    def __init__(self, info: EngineInfo, step_time_s: float) -> None:
        self._info = info
        self.step_time_s = step_time_s
        self.pool = array("i", [NOTHING_WRITTEN]) * ((info.num_blocks + info.num_host_blocks) * info.block_size)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def warm_up(self) -> None:
        """Nothing to warm."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `engine_core.engine.Engine`; host blocks are the last ones of the pool."""
        size = self._info.block_size
        for copy in copies:
            block_and_slot(copy, self._info.num_blocks, self._info.num_host_blocks)
            source, target = (number * size for number in copy)
            self.pool[target : target + size] = self.pool[source : source + size]

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `engine_core.engine.Engine`; takes `step_time_s`; ValueError for rows that do not fit."""
        began = time.monotonic()
        check_rows(rows, self._info)
        for row in rows:
            for position, token in enumerate(row.tokens, row.start):
                self.pool[self.slot(row, position)] = token
        sampled = [None if row.sampling is None else self.answer(row, row.sampling) for row in rows]
        remaining_s = began + self.step_time_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        return sampled

    def score(self, row: Row) -> Scored:
        """See `engine_core.engine.Engine`: every known token was certain."""
        [sampled] = self.step([row])
        count = row.scoring.num_logprobs if row.scoring is not None else 0
        targets = row.scoring.targets if row.scoring is not None else ()
        return Scored(tuple(Sampled(target, 0.0, ((target, 0.0),) if count else ()) for target in targets), sampled)

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """There are none: ValueError."""
        raise ValueError("the echo engine has no hidden states")

    def slot(self, row: Row, position: int) -> int:
        block_size = self._info.block_size
        return row.blocks[position // block_size] * block_size + position % block_size

    def answer(self, row: Row, sampling: Sampling) -> Sampled:
        """The token to say, or the next id that may be said (NOTHING_ALLOWED when none may)."""
        generated = row.start + len(row.tokens) - row.prompt_len
        token = self.pool[self.slot(row, generated % row.prompt_len)]
        if token >= 0 and (sampling.banned or sampling.allowed is not None):
            vocab_size = self._info.vocab_size
            following = ((token + offset) % vocab_size for offset in range(vocab_size))
            token = next((candidate for candidate in following if may_follow(candidate, sampling)), NOTHING_ALLOWED)
        if sampling.num_logprobs is None:
            return Sampled(token)
        return Sampled(token, 0.0, ((token, 0.0),) if sampling.num_logprobs else ())


def may_follow(token: int, sampling: Sampling) -> bool:
    """Whether neither the banned nor the allowed tokens exclude this one."""
    mask = sampling.allowed
    in_mask = mask is None or (token < 8 * len(mask) and mask[token >> 3] >> (token & 7) & 1 == 1)
    return in_mask and token not in sampling.banned


def plan_pool(config: EngineConfig) -> tuple[int, int]:
    """Number of blocks and longest sequence, from the same settings as for an engine with a model."""
    wanted_len = config.max_model_len or DEFAULT_MODEL_LEN
    num_blocks = (
        config.num_blocks
        or config.kv_cache_bytes // (TOKEN_BYTES * config.block_size)
        or DEFAULT_FULL_SEQUENCES * -(-wanted_len // config.block_size)
    )
    max_model_len = min(wanted_len, num_blocks * config.block_size)
    if config.max_model_len > max_model_len:
        raise OutOfMemoryError(
            f"{num_blocks} blocks of {config.block_size} tokens cannot hold a sequence of {wanted_len}; "
            "raise num_blocks or lower max_model_len"
        )
    return num_blocks, max_model_len


def check(config: EngineConfig) -> str:
    """What would answer, for a person. Raises what `load` would."""
    if config.vocab_size < 1:
        raise ModelError("the echo engine has no model to take a vocabulary from; set vocab_size")
    if config.quantise is not None or any(
        kind != "auto" for kind in (config.device, config.dtype, config.kv_dtype, config.attention)
    ):
        raise ModelError(
            "the echo engine computes nothing; leave quantise empty and device, dtype, kv_dtype and attention at auto, "
            "or choose another engine"
        )
    plan_pool(config)
    return "the echo engine, which has no model"


def load(config: EngineConfig, progress: Progress) -> EchoEngine:
    """An engine with `config.vocab_size` tokens. Raises ModelError without one, OutOfMemoryError for an
    impossible pool.
    """
    progress("open", 0.0)
    check(config)
    num_blocks, max_model_len = plan_pool(config)
    info = EngineInfo(
        name="echo",
        model="echo",
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_host_blocks=config.num_host_blocks or config.host_kv_cache_bytes // (TOKEN_BYTES * config.block_size),
        device="none",
        kernels="none",
    )
    engine = EchoEngine(info, config.step_time_s)
    progress("kv_pool", 1.0)
    return engine
