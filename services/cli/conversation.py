"""A conversation over the bus: turns are read from stdin, answers go to stdout."""

import asyncio
import sys
import threading

from schemas.errors import InvalidRequest
from schemas.generation import ChatMessage, GenerateRequest
from services.cli.answer import ask, write_now
from services.runtime.bus import Bus


class Conversation:
    """The messages so far, and how the next answer is asked for."""

    def __init__(
        self,
        model: str,
        *,
        system: str | None,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        accept_timeout_s: float,
    ) -> None:
        self._template = GenerateRequest(model=model, max_tokens=max_tokens, temperature=temperature, seed=seed)
        self._accept_timeout_s = accept_timeout_s
        self._messages = [ChatMessage(role="system", content=system)] if system else []

    async def hold(self, bus: Bus) -> None:
        """Take turns until the end of stdin; a refused turn is taken back and explained."""
        while (line := await _read_line()) is not None:
            if not line.strip():
                continue
            self._messages.append(ChatMessage(role="user", content=line.strip()))
            request = self._template.model_copy(update={"messages": tuple(self._messages)})
            try:
                answer = await ask(bus, request, self._accept_timeout_s, write_now)
            except InvalidRequest as error:
                self._messages.pop()
                print(f"Error ({error.code}): {error.message}", file=sys.stderr)
                continue
            write_now("\n")
            self._messages.append(ChatMessage(role="assistant", content=answer.text))


async def _read_line() -> str | None:
    """Return a line of stdin, None at its end; the thread that waits does not keep the process alive."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def read() -> None:
        text = sys.stdin.readline()
        loop.call_soon_threadsafe(settle, text or None)

    def settle(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    threading.Thread(target=read, name="stdin", daemon=True).start()
    return await line
