"""The native engine: rows in, tokens out, one call into the kernels per step.

Greedy rows that ask for nothing else get their token from the kernels; only the others' logits come back and go through
`engine_core.sampling`. Owns the native model and its cache; knows nothing of files.
"""

import ctypes
import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.batch import Row, Sampled, Sampling, Scored
from engine_core.block_copies import BlockCopy, block_and_slot
from engine_core.engine import EngineInfo
from engine_core.native.step_arrays import Float32s, Int32s, StepArrays, arrays_of, last_tokens
from engine_core.row_checks import check_rows
from engine_core.sampling import GREEDY_BELOW_TEMPERATURE, is_settled, pieces_of, sample_one, score


class NativeEngine:
    """Use from one thread at a time; the model's own threads sleep between steps."""

    def __init__(self, library: ctypes.CDLL, model: int, info: EngineInfo) -> None:
        self._library = library
        self._model = model
        self._info = info
        self._host = np.zeros((info.num_host_blocks, library.nj_model_block_bytes(model)), dtype=np.uint8)
        self._logits = np.empty((0, info.vocab_size), dtype=np.float32)
        # Sampling a few rows gains nothing from threads, and a second team of them would fight the model's for cores.
        torch.set_num_threads(1)
        weakref.finalize(self, library.nj_model_destroy, model)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def scratch_block(self) -> int:
        """A block beyond the pool that no block table names."""
        return self._info.num_blocks

    def warm_up(self) -> None:
        """A prompt, a decode step and a sampled row, in the scratch block."""
        count = self._info.block_size
        greedy, random = Sampling(position=count, seed=0, temperature=0.0), Sampling(position=count, seed=0, top_p=0.9)
        for sampling in (greedy, random):
            self._sample([Row((0,) * count, 0, (self.scratch_block,), count, sampling)])
            self._sample([Row((0,), count - 1, (self.scratch_block,), count, sampling)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `engine_core.engine.Engine`."""
        for copy in copies:
            block, slot = block_and_slot(copy, self._info.num_blocks, self._info.num_host_blocks)
            self._library.nj_model_copy_block(self._model, block, copy[1] == block, self._host[slot].ctypes.data)

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `engine_core.engine.Engine`. Raises ValueError, nothing written, for rows that do not fit.

        A row whose logits are not finite gets the token `engine_core.batch.NO_TOKEN`, the others their own.
        """
        check_rows(rows, self._info)
        return self._sample(rows)

    def score(self, row: Row) -> Scored:
        """See `engine_core.engine.Engine`."""
        check_rows([row], self._info)
        return score(((piece, self.logits_after_each_token([piece])) for piece in pieces_of(row)), row)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Run the rows → float32 [rows with `sampling`, vocab], the logits after their last tokens."""
        outputs = last_tokens(rows)
        self._run(arrays_of(rows, outputs, [True] * len(outputs)))
        return torch.from_numpy(self._logits[: len(outputs)].copy())

    def logits_after_each_token(self, rows: Sequence[Row]) -> Tensor:
        """Run the rows → float32 [all their tokens, vocab]: what scoring a text needs."""
        count = sum(len(row.tokens) for row in rows)
        self._run(arrays_of(rows, range(count), [True] * count))
        return torch.from_numpy(self._logits[:count].copy())

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """See `engine_core.engine.Engine`."""
        check_rows(rows, self._info)
        ends = list(accumulate(len(row.tokens) for row in rows))
        begins = [end - (1 if row.hidden == "last" else len(row.tokens)) for row, end in zip(rows, ends, strict=True)]
        outputs = [token for begin, end in zip(begins, ends, strict=True) for token in range(begin, end)]
        hidden = np.empty((len(outputs), self._info.embedding_size), dtype=np.float32)
        self._run(arrays_of(rows, outputs, [False] * len(outputs)), hidden)
        counts = accumulate(end - begin for begin, end in zip(begins, ends, strict=True))
        return np.split(hidden, list(counts)[:-1])

    def _sample(self, rows: Sequence[Row]) -> list[Sampled | None]:
        specs = [row.sampling for row in rows if row.sampling is not None]
        wants_logits = [not is_plain_greedy(spec) for spec in specs]
        best = self._run(arrays_of(rows, last_tokens(rows), wants_logits))
        chosen = [Sampled(token) for token in best.tolist()]
        asked = [number for number, wanted in enumerate(wants_logits) if wanted]
        for row, number in enumerate(asked):
            if not is_settled(specs[number], likeliest := chosen[number].token):
                chosen[number] = sample_one(torch.from_numpy(self._logits[row]), specs[number], likeliest)
        answers = iter(chosen)
        return [None if row.sampling is None else next(answers) for row in rows]

    def _run(self, arrays: StepArrays, hidden: Float32s | None = None) -> Int32s:
        """One native step → the likeliest token of each output, -1 where logits are not finite."""
        num_logits = int(arrays.logits_row.max(initial=-1)) + 1
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self._info.vocab_size), dtype=np.float32)
        best = np.empty(len(arrays.output_tokens), dtype=np.int32)
        batch = arrays.as_batch(self._logits, best, hidden)
        if self._library.nj_model_step(self._model, ctypes.byref(batch)) != 0:
            raise ValueError("the kernels refuse the step: a token, position or block is out of range")
        return best


def is_plain_greedy(spec: Sampling) -> bool:
    """Whether the likeliest token is all that is asked for."""
    greedy = spec.temperature < GREEDY_BELOW_TEMPERATURE or spec.top_k == 1
    return greedy and spec.is_plain
