"""Causal attention over a paged KV pool by torch's own fused kernel, on any device and in any number type.

Tiles, and so row independence, are those of paged.py: the kernel sees shapes that follow from positions alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine_core.attention.paged import QUERY_TILE, Span, attention_of_spans


def sdpa_attention(queries: Tensor, pool: Tensor, spans: Sequence[Span]) -> Tensor:
    """As `engine_core.attention.paged.paged_attention`."""
    return attention_of_spans(queries, pool, spans, sdpa_tile)


def sdpa_tile(queries: Tensor, history: Tensor) -> Tensor:
    """One tile: queries [QUERY_TILE, heads, head_dim], which stand at the last positions of the history.

    history [2, positions, kv_heads, head_dim] → [QUERY_TILE, heads, head_dim].
    """
    num_positions = history.shape[1]
    positions = torch.arange(num_positions, device=queries.device)
    may_see = positions <= positions[-QUERY_TILE:, None]
    keys, values = history.transpose(1, 2)[:, None]
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=may_see, scale=1.0, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
