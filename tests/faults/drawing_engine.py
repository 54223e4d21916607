"""An engine for tests that really draws tokens, with every option of sampling, from logits that the last tokens decide.

Tokens are read back through the row's own block table, as in the echo engine, whose pool this is. The alphabet is small
and has a character of two bytes, so that stop strings occur and characters come in pieces.
"""

import torch

from engine_core import echo
from engine_core.batch import Row, Sampled, Sampling
from engine_core.engine import EngineConfig, Progress
from engine_core.sampling import sample

CONTEXT = 6
"""So many tokens decide the next one's logits."""
ALPHABET = "abcdefgh é".encode()
JSON_SIGNS = b'{}[]":, 0123456789'
SPREAD, SIGNS_BELOW, OTHERS_BELOW = 2.0, 3.0, 20.0
"""Signs are less likely than letters, and anything else comes only when a grammar leaves nothing better."""


class DrawingEngine(echo.EchoEngine):
    """An echo engine whose answers are drawn."""

    def answer(self, row: Row, sampling: Sampling) -> Sampled:
        """Draw the token that follows the row's last one."""
        end = row.start + len(row.tokens)
        context = [self.pool[self.slot(row, position)] for position in range(max(0, end - CONTEXT), end)]
        return sample(logits_after(context, self.info.vocab_size)[None], [sampling])[0]


def logits_after(context: list[int], vocab_size: int) -> torch.Tensor:
    """Return float32 [vocab]: any function of the context will do, if it is the same in every process."""
    seed = 0
    for token in context:
        seed = (seed * 1_000_003 + token + 7) % (1 << 62)
    drawn = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * SPREAD
    above = torch.full((vocab_size,), -OTHERS_BELOW)
    above[torch.tensor(list(JSON_SIGNS))] = -SIGNS_BELOW
    above[torch.tensor(list(ALPHABET))] = 0.0
    return drawn + above


def load(config: EngineConfig, progress: Progress) -> DrawingEngine:
    """Load as the echo engine does."""
    engine = echo.load(config, progress)
    return DrawingEngine(engine.info, config.step_time_s)
