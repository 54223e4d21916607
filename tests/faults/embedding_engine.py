"""An engine for tests that has hidden states: any function of a position's tokens so far, read back from the pool.

So a wrong block table, a position left out or a row computed by a chunk's length shows in the vector.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine_core import echo
from engine_core.batch import Row
from engine_core.engine import EngineConfig, Progress

CONTEXT = 5
SIZE = 24


class EmbeddingEngine(echo.EchoEngine):
    """An echo engine with hidden states."""

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return per row float32 [tokens asked for, SIZE]."""
        self.step(rows)
        return [self._states(row) for row in rows]

    def _states(self, row: Row) -> NDArray[np.float32]:
        end = row.start + len(row.tokens)
        begin = row.start if row.hidden == "all" else end - 1
        return np.stack([self._state(row, position) for position in range(begin, end)])

    def _state(self, row: Row, position: int) -> NDArray[np.float32]:
        context = [self.pool[self.slot(row, p)] for p in range(max(0, position - CONTEXT), position + 1)]
        seeds = [position, *(token + 2 for token in context)]
        return np.random.default_rng(seeds).standard_normal(SIZE).astype(np.float32)


def load(config: EngineConfig, progress: Progress) -> EmbeddingEngine:
    """Load as the echo engine does."""
    engine = echo.load(config, progress)
    return EmbeddingEngine(replace(engine.info, embedding_size=SIZE), config.step_time_s)
