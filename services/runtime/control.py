"""Commands of an operator: every service answers them on its role's control subject, and a client gathers the answers.

A command goes to all instances of a role at once; each reply names its instance. What a command does is the service's
matter: it gives a dict literal of command → function. Knows no service.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from pydantic import JsonValue

from schemas.codec import decode
from schemas.control import ControlReply, ControlRequest, Registration
from schemas.errors import InternalError, InvalidRequest, NatterjackError
from services.runtime.bus import Bus, Incoming
from services.runtime.transport import RawMessage, Subscription

log = logging.getLogger(__name__)

Arguments = Mapping[str, JsonValue]
Command = Callable[[Arguments], Awaitable[dict[str, JsonValue]]]
"""Does what was asked and returns what a person or a script may want to know; raises coded errors."""


ANSWER_TIMEOUT_S = 1.0


class ControlServer:
    """Answers for one instance; use it as an async context manager."""

    def __init__(self, bus: Bus, own: Registration, commands: Mapping[str, Command]) -> None:
        self._bus = bus
        self._own = own
        self._commands = commands
        self._subscription: Subscription | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ControlServer":
        subject = self._bus.subjects.control(self._own.role)
        self._subscription = await self._bus.subscribe(subject, ControlRequest, self._receive)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Answer what was asked before: the command may be the cause of this end."""
        if self._subscription is not None:
            await self._subscription.close()
        if self._running:
            await asyncio.wait(set(self._running), timeout=ANSWER_TIMEOUT_S)

    def _receive(self, incoming: Incoming[ControlRequest]) -> None:
        request = incoming.message
        if request.instance not in (None, self._own.instance):
            return
        task = asyncio.get_running_loop().create_task(self._answer(request, incoming.reply))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, request: ControlRequest, inbox: str | None) -> None:
        reply = await self._run(request)
        if reply.error is not None:
            log.warning("the command %s was refused: %s", request.command[:64], reply.error.message)
        else:
            log.info("the command %s was carried out: %s", request.command, reply.result)
        if inbox is not None:
            with contextlib.suppress(NatterjackError):  # nobody is left to tell
                await self._bus.publish(inbox, reply)

    async def _run(self, request: ControlRequest) -> ControlReply:
        reply = ControlReply(instance=self._own.instance, role=self._own.role, command=request.command)
        try:
            command = self._commands.get(request.command)
            if command is None:
                known = ", ".join(sorted(self._commands)) or "none"
                raise InvalidRequest(f"A {self._own.role} has no command {request.command[:64]!r}; it knows: {known}.")
            return reply.model_copy(update={"result": await command(request.arguments)})
        except NatterjackError as error:
            return reply.model_copy(update={"error": error.body()})
        except Exception:
            log.exception("a bug in the command %s", request.command)
            bug = InternalError("An internal error occurred; the service's log has the cause.")
            return reply.model_copy(update={"error": bug.body()})


async def ask_all(
    bus: Bus, role: str, request: ControlRequest, *, expected: Collection[str], timeout_s: float
) -> list[ControlReply]:
    """Send a command to a role's instances; return what has been answered when all `expected` have, or at the deadline.

    Whoever answers without being expected (it has just started) is in the result as well. Raises Unavailable when
    nothing can be sent.
    """
    replies: dict[str, ControlReply] = {}
    news = asyncio.Event()

    def collect(raw: RawMessage) -> None:
        with contextlib.suppress(NatterjackError):  # such as the server's word that nobody listens
            reply = decode(ControlReply, raw.headers, raw.body)
            replies[reply.instance] = reply
            news.set()

    inbox, deadline_s = bus.transport.new_inbox(), time.monotonic() + timeout_s
    subscription = await bus.transport.subscribe(inbox, collect)
    try:
        await bus.publish(bus.subjects.control(role), request, reply=inbox)
        while set(expected) - replies.keys() and (remaining_s := deadline_s - time.monotonic()) > 0:
            news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await news.wait()
    finally:
        await subscription.close()
    return sorted(replies.values(), key=lambda reply: reply.instance)
