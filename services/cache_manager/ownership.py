"""Which of several cache managers keeps a model's books: one at a time; the others stand by. An edge module.

The owner renews its hold; one that cannot be certain of it any more (it was stopped, or cut off) answers nothing, and
forgets its books before it owns them again: another one may have kept them meanwhile.
"""

import logging

from schemas.control import CacheOwnership
from schemas.errors import NatterjackError
from schemas.subjects import subject_token
from services.runtime.leases import Held, Leases
from services.runtime.service import Context

log = logging.getLogger(__name__)

KEY = "cache_manager"


class Ownership:
    """This instance's hold on the books of one model."""

    def __init__(self, context: Context, model: str, lease_s: float) -> None:
        self._leases = Leases(context.bus, CacheOwnership, lease_s)
        self._key = f"{KEY}.{subject_token(model)}"
        self._entry = CacheOwnership(model=model, cache_manager=context.instance, incarnation=context.incarnation)
        self._held: Held[CacheOwnership] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of our hold; 0 without one."""
        return self._held.epoch if self._held is not None else 0

    @property
    def is_certain(self) -> bool:
        """Tell whether the books are surely ours at this moment."""
        return self._held is not None and self._leases.is_certain(self._held)

    async def check(self) -> bool:
        """Renew the hold, or try to get one; returns whether the books are ours."""
        held = self._held
        if held is not None and self._leases.is_certain(held) and await self._leases.renew(held):
            return True
        self._held = None
        try:
            self._held = await self._leases.take(self._key, self._entry, self._is_ours)
        except NatterjackError as error:
            log.warning("the hold on the books could not be taken: %s", error.message)
        return self._held is not None

    def _is_ours(self, found: CacheOwnership) -> bool:
        return found.cache_manager == self._entry.cache_manager

    async def give_back(self) -> None:
        """Let one that stands by take over at once."""
        held, self._held = self._held, None
        if held is not None:
            await self._leases.give_back(held)
