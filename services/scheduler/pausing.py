"""A pause: an operator's word that no request begins until `resume`. An edge module.

The word lies in a bucket, so it outlives every scheduler, and whoever missed the command reads it there; the schedulers
of the model are its only writers. Requests still come from the queue and wait, so that deadlines and cancellations
count as ever.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

from pydantic import JsonValue

from schemas.control import Pause
from schemas.errors import InvalidParameter, NatterjackError
from schemas.subjects import subject_token
from services.runtime.control import Arguments
from services.runtime.service import Context

log = logging.getLogger(__name__)

KEY = "pause"
READ_PERIOD_S = 1.0
WORDS = {None: "", "finish": "paused: new requests wait", "hold": "paused: every request waits"}


class Pausing:
    """Whether requests of one model may begin, and whether those that have begun go on."""

    def __init__(self, context: Context, model: str, changed: Callable[[], None]) -> None:
        self._context = context
        self._bus = context.bus
        self._model = model
        self._changed = changed
        self._key = f"{KEY}.{subject_token(model)}"
        self._pause: Pause | None = None
        self._read_s = 0.0

    @property
    def may_begin(self) -> bool:
        """Tell whether new requests may run."""
        return self._pause is None

    @property
    def is_held(self) -> bool:
        """Tell whether even what runs has to stop where it is."""
        return self._pause is not None and self._pause.in_flight == "hold"

    async def read(self, now_s: float) -> None:
        """Learn of a pause from the bucket, now and then; keep the last word while the bus is away."""
        if now_s - self._read_s < READ_PERIOD_S:
            return
        self._read_s = now_s
        try:
            stored = await self._bus.kv_get(self._bus.subjects.leases, self._key, Pause)
        except NatterjackError as error:
            log.warning("the pause could not be read: %s", error.message)
            return
        self._set(None if stored is None else stored.message)

    async def pause(self, arguments: Arguments) -> dict[str, JsonValue]:
        """Begin a pause, for all schedulers of the model; `in_flight`: finish (the default) or hold what runs."""
        in_flight = _in_flight(arguments.get("in_flight", "finish"))
        pause = Pause(model=self._model, in_flight=in_flight, since_s=time.time())
        await self._bus.kv_put(self._bus.subjects.leases, self._key, pause)
        self._set(pause)
        return {"state": "paused", "model": self._model, "in_flight": in_flight}

    async def resume(self, arguments: Arguments) -> dict[str, JsonValue]:
        """End a pause; harmless when there is none."""
        await self._bus.kv_delete(self._bus.subjects.leases, self._key)
        self._set(None)
        return {"state": "running", "model": self._model}

    def _set(self, pause: Pause | None) -> None:
        detail = WORDS[None if pause is None else pause.in_flight]
        if detail != self._context.heartbeat.registration.detail:
            self._context.heartbeat.update(detail=detail)
        if pause == self._pause:
            return
        self._pause = pause
        log.warning("%s", detail or "the pause has ended")
        self._changed()


def _in_flight(value: JsonValue) -> Literal["finish", "hold"]:
    match value:
        case "finish" | "hold":
            return value
    raise InvalidParameter("in_flight is 'finish' or 'hold'.", param="in_flight")
