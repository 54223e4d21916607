"""Causal attention over a paged KV pool, in plain torch: the reference for every faster kernel.

Row-independent by construction. Queries are computed in tiles of QUERY_TILE consecutive positions that begin
at multiples of QUERY_TILE, against all positions up to the tile's end; what is not (yet) there is zero and
masked. So the shape of each product, a query's place in it and the order of every sum depend on the query's
position alone: not on the other rows, and not on how the prompt was cut into chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

QUERY_TILE = 16
CPU = torch.device("cpu")

TileKernel = Callable[[Tensor, Tensor], Tensor]
"""(queries [QUERY_TILE, heads, head_dim], history [2, positions, kv_heads, head_dim]) → as the queries."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One row's tokens: rows [first, first + count) of the step's tensors, at positions start, start + 1, ….

    `pool_slots` int64: where positions 0, 1, … of the sequence lie in the pool (block x block_size + offset),
    up to `end` rounded up to a multiple of QUERY_TILE; those from `end` on are never used.
    """

    first: int
    count: int
    start: int
    pool_slots: Tensor

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def own_slots(self) -> Tensor:
        """Where the row's own keys and values go: [count]."""
        return self.pool_slots[self.start : self.end]


def span_in_pool(
    first: int, count: int, start: int, blocks: Sequence[int], block_size: int, device: torch.device = CPU
) -> Span:
    """The span of `count` tokens whose sequence has the block table `blocks`; its slots are on `device`."""
    end = start + count
    table = torch.tensor(blocks[: -(-end // block_size)])[:, None] * block_size
    slots = (table + torch.arange(block_size)).flatten()[:end]
    padding = -end % QUERY_TILE
    padded = torch.cat((slots, slots.new_zeros(padding))) if padding else slots
    return Span(first, count, start, padded.to(device))


def paged_attention(queries: Tensor, pool: Tensor, spans: Sequence[Span]) -> Tensor:
    """Attention of all spans over one layer's pool, in which their own keys and values are already written.

    queries [≥ tokens, heads, head_dim], scaled by the caller; pool [2 (keys, values), slots, kv_heads,
    head_dim] → [as queries, heads x head_dim], zero where no span is. The pool may keep another number type than that
    of the queries, in which all is computed.
    """
    return attention_of_spans(queries, pool, spans, tile_attention)


def attention_of_spans(queries: Tensor, pool: Tensor, spans: Sequence[Span], tile: TileKernel) -> Tensor:
    """`paged_attention` with any kernel for a tile."""
    attended = torch.zeros_like(queries)
    for span in spans:
        rows = slice(span.first, span.first + span.count)
        history = read_history(pool, span).to(queries.dtype)
        attended[rows] = span_attention(queries[rows], history, span, tile)
    return attended.flatten(1)


def read_history(pool: Tensor, span: Span) -> Tensor:
    """Keys and values of positions [0, span.end), then zeros: [2, len(span.pool_slots), kv_heads, head_dim].

    The zeros matter: a stale NaN in a block would survive a multiplication by 0.
    """
    history = pool.index_select(1, span.pool_slots)
    history[:, span.end :] = 0.0
    return history


def span_attention(queries: Tensor, history: Tensor, span: Span, tile_kernel: TileKernel) -> Tensor:
    """queries [count, heads, head_dim], history as from `read_history` → [count, heads, head_dim]."""
    tiles_begin = span.start // QUERY_TILE * QUERY_TILE
    offset = span.start - tiles_begin
    padded = queries.new_zeros(history.shape[1] - tiles_begin, *queries.shape[1:])
    padded[offset : offset + span.count] = queries
    tiles = [
        tile_kernel(tile, history[:, : tiles_begin + (index + 1) * QUERY_TILE])
        for index, tile in enumerate(torch.split(padded, QUERY_TILE))
    ]
    return torch.cat(tiles)[offset : offset + span.count]


def tile_attention(queries: Tensor, history: Tensor) -> Tensor:
    """One tile: queries [QUERY_TILE, heads, head_dim], which stand at the last positions of the history.

    history [2, positions, kv_heads, head_dim] → [QUERY_TILE, heads, head_dim].
    """
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = history.shape[2]
    # Query heads that share a KV head become rows of one product: [kv_heads, QUERY_TILE x group, head_dim].
    grouped = queries.view(QUERY_TILE, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    keys, values = history.transpose(1, 2)
    scores = torch.bmm(grouped, keys.mT)
    newest = scores.view(num_kv_heads, QUERY_TILE, -1, scores.shape[-1])[..., -QUERY_TILE:]
    newest.masked_fill_(future_mask(queries.device), -torch.inf)
    attended = torch.bmm(torch.softmax(scores, dim=-1), values)
    by_query = attended.view(num_kv_heads, QUERY_TILE, -1, head_dim).transpose(0, 1)
    return by_query.reshape(QUERY_TILE, num_heads, head_dim)


@cache
def future_mask(device: torch.device) -> Tensor:
    """[QUERY_TILE, 1, QUERY_TILE], true where the key comes after the query."""
    return torch.ones(QUERY_TILE, QUERY_TILE, dtype=torch.bool, device=device).triu(1)[:, None]
