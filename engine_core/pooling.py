"""One vector from a sequence's hidden states, which come row by row. Knows no model.

The mean adds float64 values position by position, so its bits do not depend on how the sequence was cut into rows.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray


class HiddenPool:
    """What has come of one sequence's hidden states: the sum of `num_added` of them, or the last one."""

    def __init__(self, kind: Literal["mean", "last"]) -> None:
        self.kind = kind
        self.num_added = 0
        self._pooled: NDArray[np.float64] | None = None

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Take the states [positions, size] that follow those added before."""
        for state in hidden.astype(np.float64):
            self._pooled = state if self._pooled is None or self.kind == "last" else self._pooled + state
        self.num_added += len(hidden)

    def vector(self, dimensions: int | None = None) -> NDArray[np.float32] | None:
        """Return the first `dimensions` values, L2-normalised; None where there is no direction (zeros, NaN, inf).

        A mean need not be divided by the number of positions: it is normalised.
        """
        if self._pooled is None:
            return None
        kept = self._pooled[:dimensions]
        norm = math.sqrt(math.fsum((kept * kept).tolist())) if np.isfinite(kept).all() else 0.0
        return (kept / norm).astype(np.float32) if norm else None
