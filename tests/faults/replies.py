"""A client that knows nothing but NATS: it asks with a reply subject and takes what comes there, in the order it comes.

After a takeover the last chunk may come once more; its `start` tells. Nothing else may be repeated, lost or misplaced.
"""

import asyncio
from dataclasses import dataclass, field

from schemas.codec import decode, encode
from schemas.errors import NatterjackError
from schemas.generation import GenerateRequest
from schemas.output import OutputChunk
from services.runtime.bus import Bus
from services.runtime.transport import RawMessage
from tests.faults.streams import STREAM_TIMEOUT_S, echo


@dataclass
class ReplyStream:
    """One request, what it should say, and what came on its reply subject."""

    prompt: str
    num_tokens: int
    said: list[int] = field(default_factory=list)
    text: str = ""
    num_repeated: int = 0
    is_final: bool = False
    problem: str = ""
    longest_silence_s: float = 0.0

    async def run(self, bus: Bus) -> None:
        """Ask once, and read to the final chunk."""
        ended = asyncio.Event()
        inbox = bus.transport.new_inbox()
        subscription = await bus.transport.subscribe(inbox, lambda raw: self._take(raw, ended))
        request = GenerateRequest(model="smol", prompt=self.prompt, max_tokens=self.num_tokens, temperature=0)
        try:
            await bus.transport.publish(bus.subjects.generate("smol"), encode(request), {}, inbox)
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await ended.wait()
        except TimeoutError:
            self.problem = self.problem or f"hung after {len(self.said)} tokens"
        finally:
            await subscription.close()
        if not self.problem and self.text != echo(self.prompt, self.num_tokens):
            self.problem = f"said {self.text!r:.200}"

    def _take(self, raw: RawMessage, ended: asyncio.Event) -> None:
        try:
            chunk = decode(OutputChunk, raw.headers, raw.body)
        except NatterjackError:  # the word that it was accepted
            return
        for delta in chunk.choices:
            if delta.start < len(self.said) and list(delta.token_ids) == self.said[delta.start :]:
                self.num_repeated += 1
                continue
            if delta.start != len(self.said) or self.is_final:
                self.problem = self.problem or f"token {delta.start} came after {len(self.said)}"
            self.said += delta.token_ids
            self.text += delta.text
        self.is_final |= chunk.final
        if chunk.error is not None:
            self.problem = f"error: {chunk.error.message}"
        if chunk.final:
            ended.set()


def reply_streams(numbers: range, num_tokens: int) -> list[ReplyStream]:
    """Return streams that differ in their prompts."""
    return [ReplyStream(f"reply {number} repeats; ", num_tokens + number % 37) for number in numbers]
