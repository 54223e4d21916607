"""What one executor's sequences ask of the cache manager, and what has been heard from it. Pure: messages in and out.

Owns the releases to send, the copies to pass on, and the hints about what the pool holds. The sequences belong to
`executor_state`.
"""

from collections.abc import Iterable

from schemas.cache import Acquire, BlockCopy, CacheReply, Extend, Grant, Lease, OpenPool, Operation, Register, Release
from schemas.control import ExecutorCapacity
from services.scheduler.block_keys import Naming
from services.scheduler.known_prefixes import KnownPrefixes
from services.scheduler.planner import Limits, to_extend
from services.scheduler.requests import Sequence


class BlockLeases:
    """The leases of one executor's sequences in one epoch.

    `is_full`: the pool refused something and nothing has come back since. Of `num_copies` block copies has been heard,
    which every cache command tells.
    """

    def __init__(self, capacity: ExecutorCapacity, limits: Limits, naming: Naming) -> None:
        self.known = KnownPrefixes(capacity.num_blocks + capacity.num_host_blocks)
        self.num_free_blocks = capacity.num_blocks
        self.num_copies = 0
        self.is_full = False
        self._capacity = capacity
        self._limits = limits
        self._naming = naming
        self._releases: list[Register | Release] = []
        self._copies: list[BlockCopy] = []

    # ---- what to ask

    def open_pool(self, incarnation: str, running: Iterable[Sequence]) -> OpenPool:
        """Return the operation that makes the cache manager know this pool, with the leases held now."""
        return OpenPool(
            incarnation=incarnation,
            num_blocks=self._capacity.num_blocks,
            num_host_blocks=self._capacity.num_host_blocks,
            block_size=self._capacity.block_size,
            leases=tuple(
                Lease(sequence=s.number, blocks=tuple(s.blocks), keys=tuple(s.keys[: s.num_registered]))
                for s in running
            ),
        )

    def operations(self, running: Iterable[Sequence], acquiring: Iterable[Sequence]) -> list[Operation]:
        """Return what to ask of the cache manager now: releases first, then extensions, then acquisitions.

        New blocks are made findable along with other operations; only those of a prompt are worth a message of their
        own.
        """
        running = list(running)
        operations: list[Operation] = [*self._releases]
        self._releases = []
        needs = self._needs(running, acquiring)
        if operations or needs or any(self._has_new_prompt_block(s) for s in running):
            for s in running:
                operations += self._register(s)
        return operations + needs

    def _needs(self, running: list[Sequence], acquiring: Iterable[Sequence]) -> list[Operation]:
        lookahead = 1 if self.is_full else self._limits.lookahead_tokens
        operations: list[Operation] = [
            Extend(sequence=s.number, num_tokens=s.num_to_cover(lookahead), num_held=len(s.blocks))
            for s in self._to_extend(running)
        ]
        for s in acquiring:
            operations.append(
                Acquire(
                    sequence=s.number,
                    request_id=s.request.work.request_id,
                    num_tokens=s.num_to_cover(lookahead),
                    keys=s.prefix_keys(self._naming),
                    traceparent=s.request.traceparent,
                )
            )
        return operations

    def _to_extend(self, running: list[Sequence]) -> list[Sequence]:
        """A full pool is asked only for what keeps a sequence from running: it would refuse a look-ahead for ever."""
        if self.is_full:
            return [s for s in running if self.is_starved(s)]
        return to_extend(running, self._capacity.block_size, self._limits)

    def _has_new_prompt_block(self, sequence: Sequence) -> bool:
        end = min(sequence.num_computed, sequence.prompt_len)
        return end // self._capacity.block_size > sequence.num_registered

    def _register(self, sequence: Sequence) -> list[Register]:
        """Return what makes the sequence's newly computed full blocks findable."""
        first, block_size = sequence.num_registered, self._capacity.block_size
        num_full = min(sequence.num_computed, len(sequence.tokens)) // block_size
        if num_full <= first:
            return []
        keys = tuple(sequence.name_blocks(self._naming)[first:num_full])
        sequence.num_registered = num_full
        self.known.remember(keys)
        return [Register(sequence=sequence.number, first=first, keys=keys)]

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back, but let those be found again that were computed."""
        self._releases += [*self._register(sequence), Release(sequence=sequence.number)]
        self.known.end(sequence.keys, sequence.number)
        self.is_full = False

    # ---- what was answered

    def hear(self, reply: CacheReply) -> None:
        """Take what an answer says of the pool as a whole."""
        self.num_free_blocks = reply.num_free
        self.known.hear_of_flushes(reply.num_flushes)
        self._copies += reply.copies[max(0, self.num_copies - reply.num_copies) :]
        self.num_copies = reply.num_copies + len(reply.copies)

    def begin(self, sequence: Sequence, grant: Grant) -> bool:
        """Give a waiting sequence its blocks; False when the pool has too few, and it must wait again.

        Blocks that are loaded from host memory count as computed only when a result has proved that they were.
        """
        if not grant.granted:
            self.is_full = True
            self.known.end(sequence.keys, sequence.number)
            sequence.reset()
            return False
        sequence.blocks = list(grant.blocks)
        sequence.num_cached = sequence.num_planned = grant.num_cached
        sequence.num_computed = grant.num_cached - grant.num_loaded
        sequence.num_registered = sequence.num_computed // self._capacity.block_size
        self.known.remember(sequence.keys[: grant.num_cached // self._capacity.block_size])
        sequence.status = "running"
        return True

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return, once, the copies that the next plan must do before it runs anything."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def is_starved(self, sequence: Sequence) -> bool:
        """Tell whether the lease does not cover the sequence's next token."""
        num_covered = len(sequence.blocks) * self._capacity.block_size
        return num_covered <= sequence.num_planned < sequence.max_len - 1
