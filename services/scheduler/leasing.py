"""Holds leases on executors. An edge module: it talks to the bus.

A later owner of an executor always has a higher epoch, which its plans and its commands to the cache manager carry.
"""

from typing import TypeAlias

from schemas.control import SchedulerLease
from schemas.subjects import subject_token
from services.runtime.bus import Bus
from services.runtime.leases import Held
from services.runtime.leases import Leases as LeasesOfAKind

HeldLease: TypeAlias = Held[SchedulerLease]


class Leases:
    """The leases of one scheduler."""

    def __init__(self, bus: Bus, scheduler: str, incarnation: str, ttl_s: float) -> None:
        self._leases = LeasesOfAKind(bus, SchedulerLease, ttl_s)
        self._scheduler = scheduler
        self._incarnation = incarnation

    async def take(self, executor: str, executor_incarnation: str) -> HeldLease | None:
        """Take the lease, also from an earlier life of this scheduler; None while another one holds it."""
        lease = SchedulerLease(
            executor=executor,
            scheduler=self._scheduler,
            scheduler_incarnation=self._incarnation,
            executor_incarnation=executor_incarnation,
        )
        return await self._leases.take(subject_token(executor), lease, lambda found: found.scheduler == self._scheduler)

    async def renew(self, held: HeldLease) -> bool:
        """Prolong a lease; False when another scheduler took it, or it expired while we were away."""
        return await self._leases.renew(held)

    async def give_back(self, held: HeldLease) -> None:
        """Let another scheduler take the executor at once; a lease that is no longer ours stays with its owner."""
        await self._leases.give_back(held)
