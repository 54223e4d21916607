"""A stand-in for everything behind the gateway: accepts requests as a tokenizer does and writes a scripted output log.

It speaks the schema over a real bus, in memory or NATS. One token is one word with the space before it.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from schemas.control import Cancel
from schemas.errors import Cancelled, NatterjackError, UnsupportedParameter
from schemas.generation import UNSUPPORTED_PARAMETERS, Accepted, GenerateRequest
from schemas.output import ChoiceDelta, OutputChunk, TokenText, ToolCallDelta, Usage
from services.runtime.bus import Bus, Incoming, Server
from services.runtime.transport import Subscription

NUM_PROMPT_TOKENS = 5


def words_of(text: str) -> list[str]:
    """Split into tokens that join to `text`."""
    return re.findall(r"\s*\S+|\s+$", text)


def token_text(word: str, num_top: int = 0) -> TokenText:
    """The token with logprob -0.5, and as many alternatives."""
    top = tuple(
        TokenText(token_id=n, token=f"{word}{n}" if n else word, token_bytes=(1,), logprob=-0.5 - n)
        for n in range(num_top)
    )
    return TokenText(token_id=len(word), token=word, token_bytes=tuple(word.encode()), logprob=-0.5, top=top)


@dataclass
class Writer:
    """Writes one request's output log."""

    bus: Bus
    request: GenerateRequest
    created_s: float
    num_written: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    is_final: bool = False

    async def write(self, *choices: ChoiceDelta, **fields: object) -> None:
        """Append one chunk."""
        chunk = OutputChunk(
            request_id=self.request.request_id,
            model=self.request.model,
            created_s=self.created_s,
            epoch=1,
            choices=choices,
            **fields,
        )
        self.is_final = chunk.final
        await self.bus.append(self.bus.subjects.out(self.request.request_id), chunk)
        self.num_written += 1

    async def word(self, text: str, index: int = 0, finish_reason: str | None = None) -> None:
        """Append one token of one choice."""
        start = self.num_tokens.get(index, 0)
        self.num_tokens[index] = start + 1
        logprobs = None if self.request.logprobs is None else (token_text(text, self.request.logprobs),)
        await self.write(
            ChoiceDelta(
                index=index,
                start=start,
                token_ids=(len(text),),
                text=text,
                logprobs=logprobs,
                finish_reason=finish_reason,
            )
        )

    async def end(self) -> None:
        """Append the final chunk with the usage."""
        count = sum(self.num_tokens.values())
        await self.write(final=True, usage=Usage(prompt_tokens=NUM_PROMPT_TOKENS, completion_tokens=count))

    async def fail(self, error: NatterjackError) -> None:
        """Append the final chunk with an error."""
        await self.write(final=True, error=error.body())


Script = Callable[[Writer], Awaitable[None]]


def say(text: str, finish_reason: str = "stop") -> Script:
    """Answer every choice with `text`, a token at a time, choice by choice."""

    async def script(writer: Writer) -> None:
        words = words_of(text)
        for number, word in enumerate(words):
            is_last = number == len(words) - 1
            for index in range(writer.request.n):
                await writer.word(word, index, finish_reason if is_last else None)
        await writer.end()

    return script


def call(name: str, *arguments: str, text: str = "") -> Script:
    """Answer with text and one tool call, whose arguments come in pieces."""

    async def script(writer: Writer) -> None:
        if text:
            await writer.word(text)
        begun = ToolCallDelta(index=0, id="call_1", name=name)
        await writer.write(ChoiceDelta(token_ids=(1,), tool_calls=(begun,)))
        for piece in arguments:
            await writer.write(ChoiceDelta(token_ids=(1,), tool_calls=(ToolCallDelta(index=0, arguments=piece),)))
        await writer.write(ChoiceDelta(finish_reason="tool_calls"))
        await writer.end()

    return script


async def echo(writer: Writer) -> None:
    """Answer with the prompt."""
    await say(str(writer.request.prompt))(writer)


async def silence(writer: Writer) -> None:
    """Write nothing: the request waits in the queue."""
    await asyncio.Event().wait()


async def endless(writer: Writer) -> None:
    """Write a token now and then until cancelled."""
    while True:
        await writer.word(" word")
        await asyncio.sleep(0.01)


@dataclass
class ScriptedTokenizer:
    """Serves one model on the bus with a script."""

    bus: Bus
    model: str = "smol"
    script: Script = field(default_factory=lambda: say("alpha beta gamma"))
    refusal: NatterjackError | None = None
    refusals: list[NatterjackError] = field(default_factory=list)
    """Each is the answer to one request; later ones are accepted."""
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    writers: dict[str, Writer] = field(default_factory=dict)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _served: list[Server | Subscription] = field(default_factory=list)

    async def __aenter__(self) -> "ScriptedTokenizer":
        subjects = self.bus.subjects
        self._served = [
            await self.bus.serve(subjects.generate(self.model), GenerateRequest, self._accept, queue="tokenizers"),
            await self.bus.subscribe(subjects.cancel_all, Cancel, self._cancel),
        ]
        await self.bus.transport.flush()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for served in self._served:
            await served.close()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _accept(self, incoming: Incoming[GenerateRequest]) -> Accepted:
        request = incoming.message
        for name in sorted(UNSUPPORTED_PARAMETERS & set(request.model_extra or {})):
            raise UnsupportedParameter(f"{name!r} is not supported.", param=name)
        if self.refusals:
            raise self.refusals.pop(0)
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        accepted = Accepted(
            request_id=request.request_id,
            model=self.model,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            created_s=time.time(),
        )
        self.writers[request.request_id] = Writer(self.bus, request, accepted.created_s)
        self._running[request.request_id] = asyncio.create_task(self._write(request.request_id))
        return accepted

    async def _write(self, request_id: str) -> None:
        await asyncio.sleep(0)  # the acceptance goes first
        await self.script(self.writers[request_id])

    def _cancel(self, incoming: Incoming[Cancel]) -> None:
        request_id = incoming.message.request_id
        if request_id in self.cancelled:
            return
        self.cancelled.append(request_id)
        if (task := self._running.pop(request_id, None)) is not None:
            task.cancel()
            asyncio.get_running_loop().create_task(self._end(request_id))

    async def _end(self, request_id: str) -> None:
        if not self.writers[request_id].is_final:
            await self.writers[request_id].fail(Cancelled("cancelled by the client"))
