"""Row tiles: how a row's result is kept the same whatever other rows are in the step.

A matrix product chooses its order of summation, and an elementwise kernel its vector remainder, by the
*shape* of its input, so the bits of a row's result differ between a batch of 1 and a batch of 7. Here every
dense computation runs on tiles of one fixed number of rows, the last one padded: all calls have the same
shape, and the values of one row never enter another's. What remains, that a row's place within the tile does
not matter either, holds on the processors tried; `rows_agree` tests it on this one, and where it fails tiles
of one row are used, for which it holds by construction.

Source of the diagnosis: Horace He et al., "Defeating Nondeterminism in LLM Inference", 2025.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILE_ROWS = 16
"""As fast as one row while weights are read from memory; also a multiple of 64 bytes for every row width."""


def padded_count(num_rows: int, tile_rows: int) -> int:
    return -(-num_rows // tile_rows) * tile_rows


def pad_rows(rows: Tensor, tile_rows: int) -> Tensor:
    """[rows, …] with zero rows appended up to a whole number of tiles."""
    missing = padded_count(len(rows), tile_rows) - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def in_tiles(compute: Callable[..., Tensor], tile_rows: int, *inputs: Tensor) -> Tensor:
    """`compute` applied to tiles of `tile_rows` rows of all inputs [n x tile_rows, …]; the results joined."""
    if len(inputs[0]) == tile_rows:
        return compute(*inputs)
    tiles = zip(*(torch.split(rows, tile_rows) for rows in inputs), strict=True)
    return torch.cat([compute(*tile) for tile in tiles])


def rows_agree(compute: Callable[..., Tensor], *rows: Tensor, tile_rows: int = TILE_ROWS) -> bool:
    """Whether a tile of `tile_rows` copies of one row (each input [1, …]) gives bitwise equal rows."""
    results = compute(*(row.expand(tile_rows, *row.shape[1:]).contiguous() for row in rows))
    bits = results.view(torch.int32 if results.element_size() == 4 else torch.int16)
    return bool((bits == bits[0]).all())
