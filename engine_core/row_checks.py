"""Checks that a step's rows fit an engine, before anything is written. Knows no model and no tensors."""

from collections.abc import Sequence

from engine_core.batch import Row
from engine_core.engine import EngineInfo


def check_rows(rows: Sequence[Row], info: EngineInfo) -> None:
    """Raise ValueError for rows that the engine cannot run: a fault of the caller, who validates requests."""
    for index, row in enumerate(rows):
        if problem := row_problem(row, info):
            raise ValueError(f"row {index}: {problem}")
    written = [block for row in rows for block in written_blocks(row, info.block_size)]
    if len(set(written)) != len(written):
        raise ValueError("two rows of one step write to the same block")


def written_blocks(row: Row, block_size: int) -> tuple[int, ...]:
    return row.blocks[row.start // block_size : (row.start + len(row.tokens) - 1) // block_size + 1]


def row_problem(row: Row, info: EngineInfo) -> str | None:
    """What is wrong with the row, or None."""
    end = row.start + len(row.tokens)
    if not row.tokens:
        return "has no tokens"
    if not 0 <= min(row.tokens) <= max(row.tokens) < info.vocab_size:
        return f"has a token outside the vocabulary of {info.vocab_size}"
    if row.start < 0 or end > info.max_model_len:
        return f"has positions {row.start}..{end - 1}, outside the model length of {info.max_model_len}"
    if len(row.blocks) * info.block_size < end:
        return f"has {len(row.blocks)} blocks of {info.block_size} tokens, too few for {end} positions"
    if not 0 <= min(row.blocks) <= max(row.blocks) < info.num_blocks:
        return f"has a block outside the pool of {info.num_blocks}"
    return None
