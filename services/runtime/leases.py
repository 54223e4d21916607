"""Exclusive holds: compare-and-set entries of the lease bucket that expire unless they are renewed.

The revision at which a hold was taken is its epoch, so a later owner always has a higher one; renewals keep it. Whoever
acts on a hold refuses lower epochs, or asks `is_certain`, which no clock but this process's own decides.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.codec import Message
from schemas.errors import Conflict, NatterjackError
from services.runtime.bus import Bus

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Held(Generic[M]):
    """One hold of ours: its epoch, the revision that the next renewal expects, and when it was surely ours last."""

    key: str
    entry: M
    epoch: int
    revision: int
    renewed_s: float


class Leases(Generic[M]):
    """Holds of one kind, each living `ttl_s` beyond its last renewal."""

    def __init__(self, bus: Bus, kind: type[M], ttl_s: float) -> None:
        self._bus = bus
        self._kind = kind
        self._ttl_s = ttl_s

    async def take(self, key: str, entry: M, is_ours: Callable[[M], bool]) -> Held[M] | None:
        """Take a hold, also from an earlier life of ours; None while another one has it. Raises Unavailable."""
        bucket, asked_s = self._bus.subjects.leases, time.monotonic()
        found = await self._bus.kv_get(bucket, key, self._kind)
        if found is not None and not is_ours(found.message):
            return None
        try:
            revision = await self._bus.kv_update(
                bucket, key, entry, revision=found.sequence if found is not None else 0, ttl_s=self._ttl_s
            )
        except Conflict:
            return None
        return Held(key, entry, epoch=revision, revision=revision, renewed_s=asked_s)

    async def renew(self, held: Held[M]) -> bool:
        """Prolong a hold; False when another one took it, or it expired while we were away."""
        asked_s = time.monotonic()
        try:
            held.revision = await self._bus.kv_update(
                self._bus.subjects.leases, held.key, held.entry, revision=held.revision, ttl_s=self._ttl_s
            )
            held.renewed_s = asked_s
        except Conflict:
            return False
        except NatterjackError as error:  # the bus is away: try again before the lease expires
            log.warning("the lease on %s was not renewed: %s", held.key, error.message)
        return True

    def is_certain(self, held: Held[M]) -> bool:
        """Tell whether the hold cannot have expired yet, whatever this process slept through."""
        return time.monotonic() - held.renewed_s < self._ttl_s

    async def give_back(self, held: Held[M]) -> None:
        """Let another one take it at once; a hold that is no longer ours stays with its owner."""
        if not await self.renew(held):
            return
        try:
            await self._bus.kv_delete(self._bus.subjects.leases, held.key)
        except NatterjackError as error:
            log.warning("the lease on %s was not given back: %s", held.key, error.message)
