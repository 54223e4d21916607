"""Leases on an executor's KV blocks: what the scheduler asks of the cache manager.

All operations name absolute goals (“cover n tokens”), so a repeated message does no harm. A command is for one
executor's pool in one epoch; a cache manager that does not know the pool (it restarted) answers `pool_unknown`, and the
scheduler opens it again with the leases that it holds.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, WrapSerializer

from schemas.codec import Message, Part

BlockCopy = tuple[int, int]
"""From one block to another one: below `num_blocks` the executor's own, from there on those in its host memory."""


class Lease(Part):
    """The blocks of one sequence, in order of position; the first ones are full, computed, and known by `keys`."""

    sequence: int
    blocks: tuple[int, ...]
    keys: tuple[str, ...] = ()


class OpenPool(Part):
    """Take over an executor's pool: forget the leases of lower epochs, and hold exactly `leases`.

    `incarnation` names one life of the executor: another one means that the tensors are gone. Leases may share blocks
    that hold the same prefix. What `num_host_blocks` hold is forgotten: nobody knows which copies were done.
    """

    op: Literal["open"] = "open"
    incarnation: str
    num_blocks: int
    num_host_blocks: int = 0
    block_size: int
    leases: tuple[Lease, ...] = ()


class Acquire(Part):
    """Lease blocks to cover `num_tokens` tokens of a new sequence.

    `keys` name the content of its first blocks; those that are in the pool already are shared instead of computed.
    """

    op: Literal["acquire"] = "acquire"
    sequence: int
    request_id: str
    num_tokens: int
    keys: tuple[str, ...] = ()
    traceparent: str | None = None


class Extend(Part):
    """Make the lease cover `num_tokens` tokens; the grant holds only the blocks beyond the first `num_held`."""

    op: Literal["extend"] = "extend"
    sequence: int
    num_tokens: int
    num_held: int


class Register(Part):
    """The sequence's blocks from number `first` on are full and computed: `keys` name their content from now on."""

    op: Literal["register"] = "register"
    sequence: int
    first: int
    keys: tuple[str, ...]


class Release(Part):
    """Give the sequence's blocks back; harmless when it holds none. Registered ones stay findable until reused."""

    op: Literal["release"] = "release"
    sequence: int


def _with_op(
    operation: OpenPool | Acquire | Extend | Register | Release, serialize: SerializerFunctionWrapHandler
) -> dict[str, Any]:
    """Keep `op`, by which the reader tells the operations apart, though the codec leaves defaults out."""
    return {"op": operation.op, **serialize(operation)}


Operation = Annotated[
    OpenPool | Acquire | Extend | Register | Release, Field(discriminator="op"), WrapSerializer(_with_op)
]


class CacheCommand(Message):
    """Operations on one executor's pool, applied in order: at most one command per step.

    The sender has heard of `num_copies` block copies in this epoch; the answer repeats all later ones.
    """

    SCHEMA: ClassVar[str] = "cache_command"

    scheduler: str
    executor: str
    epoch: int
    operations: tuple[Operation, ...]
    num_copies: int = 0


class Grant(Part):
    """The answer to an acquire or extend: the blocks, or `granted` false when the pool has too few (nothing is leased).

    The first `num_cached` tokens are in the blocks already; the last `num_loaded` of these once the reply's copies are
    done.
    """

    sequence: int
    granted: bool = True
    blocks: tuple[int, ...] = ()
    num_cached: int = 0
    num_loaded: int = 0


class CacheReply(Message):
    """One grant per acquire and extend, in order; the pool's state after the command.

    `copies` between blocks are to be done in this order, before the next plan runs anything: all those of this epoch
    but the first `num_copies`.

    `num_flushes`: how often everything findable was forgotten, in the life of this cache manager. `manager_epoch` rises
    whenever another cache manager gets the books: an answer of a lower one counts no more.
    """

    SCHEMA: ClassVar[str] = "cache_reply"

    grants: tuple[Grant, ...] = ()
    num_free: int = 0
    num_blocks: int = 0
    num_flushes: int = 0
    copies: tuple[BlockCopy, ...] = ()
    num_copies: int = 0
    manager_epoch: int = 0
