"""Names the content of full KV blocks: a key stands for a block's tokens and everything before them. Pure.

Keys are chained cryptographic hashes, so two different prefixes never share a key, by accident or by design; the salt
of a request keeps its prefixes to those who know it, and what other weights computed has other names.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

DIGEST_BYTES = 16
PERSON_BYTES = 16


@dataclass(frozen=True, slots=True)
class Naming:
    """What else a block's content depends on, besides its tokens and salt."""

    block_size: int
    weights: str = ""


@lru_cache
def naming_of(block_size: int, weights: str = "") -> Naming:
    """Return the one object for these values, so that executors with the same weights are told by identity."""
    return Naming(block_size, weights)


def extend_keys(keys: list[str], tokens: Sequence[int], naming: Naming, salt: str) -> None:
    """Append the keys of the blocks that `tokens` fill and `keys` does not name yet."""
    block_size = naming.block_size
    parent = bytes.fromhex(keys[-1]) if keys else _root(naming.weights, salt)
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=parent).digest()
        keys.append(parent.hex())


def _root(weights: str, salt: str) -> bytes:
    person = hashlib.blake2b(weights.encode(), digest_size=PERSON_BYTES).digest() if weights else b""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=person).digest()
