"""A step's rows as the flat int32 arrays that the kernels take. Knows no model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from engine_core.batch import Row
from engine_core.kernels.binding import Batch

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """Input arrays of one step; see nj_batch in `kernels/source/api.h` for their meaning."""

    tokens: Int32s
    first_token: Int32s
    start: Int32s
    first_block: Int32s
    blocks: Int32s
    output_tokens: Int32s
    logits_row: Int32s

    def as_batch(self, logits: Float32s, best: Int32s, hidden: Float32s | None = None) -> Batch:
        """The C structure over these arrays and those that the step fills. They must outlive its use."""
        return Batch(
            num_tokens=len(self.tokens),
            tokens=self.tokens.ctypes.data,
            num_sequences=len(self.start),
            first_token=self.first_token.ctypes.data,
            start=self.start.ctypes.data,
            first_block=self.first_block.ctypes.data,
            blocks=self.blocks.ctypes.data,
            num_outputs=len(self.output_tokens),
            output_tokens=self.output_tokens.ctypes.data,
            logits_row=self.logits_row.ctypes.data,
            logits=logits.ctypes.data,
            best=best.ctypes.data,
            hidden=None if hidden is None else hidden.ctypes.data,
        )


def arrays_of(rows: Sequence[Row], output_tokens: Sequence[int], wants_logits: Sequence[bool]) -> StepArrays:
    """Lay the rows one after another; outputs are given by their tokens' places in that order, ascending."""
    numbers = accumulate(wants_logits)
    return StepArrays(
        tokens=int32s(chain.from_iterable(row.tokens for row in rows)),
        first_token=int32s(accumulate((len(row.tokens) for row in rows), initial=0)),
        start=int32s(row.start for row in rows),
        first_block=int32s(accumulate((len(row.blocks) for row in rows), initial=0)),
        blocks=int32s(chain.from_iterable(row.blocks for row in rows)),
        output_tokens=int32s(output_tokens),
        logits_row=int32s(number - 1 if wanted else -1 for number, wanted in zip(numbers, wants_logits, strict=True)),
    )


def last_tokens(rows: Sequence[Row]) -> list[int]:
    """Where the last tokens of the rows that sample stand among all tokens."""
    ends = accumulate(len(row.tokens) for row in rows)
    return [end - 1 for row, end in zip(rows, ends, strict=True) if row.sampling is not None]


def int32s(values: Iterable[int]) -> Int32s:
    return np.fromiter(values, dtype=np.int32)
