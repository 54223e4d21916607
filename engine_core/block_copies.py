"""Copies between an engine's KV pool and its host blocks: one numbering for both."""

BlockCopy = tuple[int, int]
"""From one block to another one: the pool's are below `num_blocks`, the host's begin there."""


def block_and_slot(copy: BlockCopy, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
    """The block of the pool and the host block, counted from 0, that a copy is between, in whichever direction.

    Raises ValueError when it is between others.
    """
    block, slot = min(copy), max(copy) - num_blocks
    if not (0 <= block < num_blocks and 0 <= slot < num_host_blocks):
        raise ValueError(f"no copy from block {copy[0]} to {copy[1]}: {num_blocks} and {num_host_blocks} exist")
    return block, slot
