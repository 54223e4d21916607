"""The gated feed-forward activation (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 x width], gates first → silu(gate) x up [n, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
