"""How large plans and cache commands become as messages, estimated from above; cuts what would not fit. Pure.

What is left out of a plan or command comes with the next one.
"""

from collections.abc import Iterable, Sequence

from schemas.cache import Acquire, OpenPool, Operation, Register
from services.scheduler.planner import Allocation
from services.scheduler.requests import Sequence as TokenSequence

TOKEN_BYTES, KEY_BYTES, PART_BYTES = 8, 36, 512
"""What a token or a block number, a block's key, and everything else of one item take at most, as text."""


def fitting(allocations: Iterable[Allocation], max_bytes: int) -> list[Allocation]:
    """Return the allocations of one plan: all of known sequences, new ones while they fit, the first one in any case.

    With `max_bytes` 0 everything fits.
    """
    chosen: list[Allocation] = []
    size_bytes = num_new = 0
    for allocation in allocations:
        if not allocation.sequence.is_known and max_bytes:
            size_bytes += new_sequence_bytes(allocation.sequence)
            num_new += 1
            if size_bytes > max_bytes and num_new > 1:
                continue
        chosen.append(allocation)
    return chosen


def new_sequence_bytes(sequence: TokenSequence) -> int:
    """Estimate what an executor's first knowledge of a sequence takes."""
    sampling = sequence.request.work.sampling
    num_numbers = len(sequence.tokens) + len(sequence.blocks) + len(sampling.allowed_token_ids)
    num_numbers += 3 * len(sampling.logit_bias) + sum(map(len, sampling.bad_words))
    return PART_BYTES + TOKEN_BYTES * num_numbers + 2 * len(sampling.grammar)


def cut(operations: Sequence[Operation], max_bytes: int) -> list[list[Operation]]:
    """Return the operations as one or more commands, in order, none larger than `max_bytes` unless one alone is."""
    parts: list[list[Operation]] = [[]]
    size_bytes = 0
    for operation in operations:
        operation_bytes = _operation_bytes(operation)
        if parts[-1] and size_bytes + operation_bytes > max_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(operation)
        size_bytes += operation_bytes
    return parts


def _operation_bytes(operation: Operation) -> int:
    match operation:
        case OpenPool():
            num_blocks = sum(len(lease.blocks) for lease in operation.leases)
            num_keys = sum(len(lease.keys) for lease in operation.leases)
            return PART_BYTES * (1 + len(operation.leases)) + TOKEN_BYTES * num_blocks + KEY_BYTES * num_keys
        case Acquire() | Register():
            return PART_BYTES + KEY_BYTES * len(operation.keys)
    return PART_BYTES
