"""Keeps what the deployment gives up, with the reason, for an operator to look at and replay. An edge module.

The client has its final chunk with an error by then: a dead letter is for people, and nothing waits for it.
"""

import asyncio
import logging
import time

from schemas.control import DeadLetter
from schemas.errors import NatterjackError
from schemas.generation import OutputSpec, WorkItem
from schemas.sampling import SamplingParams
from schemas.subjects import raw_of
from services.runtime.bus import Bus, Delivery
from services.runtime.transport import MESSAGE_ID_HEADER

log = logging.getLogger(__name__)


class DeadLetters:
    """Writes the dead letters of one scheduler."""

    def __init__(self, bus: Bus, scheduler: str) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._writing: set[asyncio.Task[None]] = set()

    def bury(self, request_id: str, delivery: Delivery[WorkItem], reason: str) -> None:
        """Store a request that was given up."""
        letter = DeadLetter(
            request_id=request_id,
            reason=reason,
            num_delivered=delivery.num_delivered,
            died_s=time.time(),
            scheduler=self._scheduler,
            work=delivery.message,
            body="" if delivery.message is not None else delivery.raw.body.decode("utf-8", "replace"),
        )
        task = asyncio.get_running_loop().create_task(self._store(letter))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _store(self, letter: DeadLetter) -> None:
        try:
            await self._bus.append(self._bus.subjects.dead(letter.request_id), letter)
        except NatterjackError as error:
            log.error("a dead letter was lost: %s", error.message, extra={"request_id": letter.request_id})

    async def settle(self) -> None:
        """Wait for what is being written."""
        if self._writing:
            await asyncio.wait(set(self._writing))


def unreadable_work(delivery: Delivery[WorkItem], model: str) -> WorkItem | None:
    """Return what stands for a work item that cannot be read, so that its output can end; None without an id."""
    message_id = delivery.headers.get(MESSAGE_ID_HEADER)
    if message_id is None:
        return None
    request_id, now_s = raw_of(message_id), time.time()
    return WorkItem(
        request_id=request_id,
        model=model,
        created_s=now_s,
        prompt_token_ids=(),
        max_tokens=1,
        sampling=SamplingParams(),
        tokenizer="",
        output=OutputSpec(request_id=request_id, model=model, created_s=now_s, num_prompt_tokens=0),
    )
