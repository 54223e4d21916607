"""Rotary position embedding (Su et al., "RoFormer", 2021), interleaved pairs.

GGUF files of the llama family hold the rows of the query and key weights permuted such that the two members
of a rotated pair are neighbours: (0, 1), (2, 3), …; the dot products are the same as with the halves layout.
"""

import torch
from torch import Tensor


class RotaryTable:
    """Cosines and sines of every position: float32 [max_positions, head_dim / 2] each.

    `scale` divides positions (linear scaling); `factors` [head_dim / 2] divide frequencies, where a file has
    them.
    """

    def __init__(
        self,
        max_positions: int,
        head_dim: int,
        theta: float,
        scale: float = 1.0,
        factors: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim) / scale
        if factors is not None:
            frequencies = frequencies / factors
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [n, num_heads, head_dim], cos and sin float32 [n, head_dim / 2] → rotated heads, same shape and type."""
    even, odd = heads.view(*heads.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return rotated.to(heads.dtype)
