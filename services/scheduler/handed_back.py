"""Notes which requests were given back on purpose, so that a graceful restart is no failed attempt. An edge module.

The queue counts every delivery; one note for all requests of a departure is stored before they are given back, and is
read only when a request has been delivered suspiciously often.
"""

import logging
import time
import uuid
from collections.abc import Sequence

from schemas.control import HandedBack
from schemas.errors import NatterjackError
from services.runtime.bus import Bus

log = logging.getLogger(__name__)

KEY = "handed_back"
NOTE_AGE_S = 86_400.0


class HandedBackNotes:
    """The notes of one scheduler, and those of all when they are counted."""

    def __init__(self, bus: Bus, scheduler: str) -> None:
        self._bus = bus
        self._scheduler = scheduler

    async def note(self, request_ids: Sequence[str]) -> None:
        """Store that these requests are about to be given back; without a bus they count as failed attempts."""
        key = f"{KEY}.{uuid.uuid4().hex}"
        entry = HandedBack(scheduler=self._scheduler, request_ids=tuple(request_ids), at_s=time.time())
        try:
            await self._bus.kv_put(self._bus.subjects.leases, key, entry, ttl_s=NOTE_AGE_S)
        except NatterjackError as error:
            log.warning("%d requests given back were not noted: %s", len(request_ids), error.message)

    async def count(self, request_id: str) -> int:
        """Return how often a request was given back on purpose; 0 when that cannot be read."""
        try:
            notes = await self._bus.kv_entries(self._bus.subjects.leases, HandedBack, under=KEY)
        except NatterjackError as error:
            log.warning("the notes of given-back requests were not read: %s", error.message)
            return 0
        return sum(note.message.request_ids.count(request_id) for note in notes)
