"""RMS normalisation (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

import torch
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows [n, width], weight [width] → [n, width]; the sum of squares is float32 whatever the type."""
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(rows.dtype) * weight
