"""attention: kernels over the paged KV pool, and the table of them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from engine_core.attention.paged import Span, paged_attention
from engine_core.attention.sdpa import sdpa_attention

AttentionKernel = Callable[[Tensor, Tensor, Sequence[Span]], Tensor]
"""(queries [≥ tokens, heads, head_dim], scaled; one layer's pool; spans) → as `paged.paged_attention`."""

ATTENTION_KERNELS: dict[str, AttentionKernel] = {
    "tiled": paged_attention,
    "sdpa": sdpa_attention,
}
"""Name → kernel."""
