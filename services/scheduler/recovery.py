"""Reads what the output log says of a request that the queue hands out again. Pure."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from schemas.output import OutputChunk
from services.scheduler.requests import DurableChoice


@dataclass(frozen=True, slots=True)
class Durable:
    """A request's output as it is stored: the last writer's epoch, each choice's tokens, and whether it is complete."""

    epoch: int
    choices: tuple[DurableChoice, ...]
    is_final: bool


def durable_output(chunks: Items[OutputChunk], n: int) -> Durable:
    """Fold a request's log, oldest chunk first, into what it holds of each of `n` choices.

    Of a choice whose beginning the log has lost (it is at its size limit) no token counts: all are generated again, and
    the log's writer skips those that it knows.
    """
    tokens: list[list[int]] = [[] for _ in range(n)]
    finished = [False] * n
    for chunk in chunks:
        for delta in chunk.choices:
            if delta.start <= len(tokens[delta.index]):
                tokens[delta.index][delta.start :] = delta.token_ids
            finished[delta.index] |= delta.finish_reason is not None
    return Durable(
        epoch=max((chunk.epoch for chunk in chunks), default=0),
        choices=tuple(
            DurableChoice(token_ids=tuple(ids), is_finished=done) for ids, done in zip(tokens, finished, strict=True)
        ),
        is_final=bool(chunks) and chunks[-1].final,
    )
