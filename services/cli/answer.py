"""Runs one request and collects, or writes as it comes, what the model says."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import from_body
from schemas.generation import GenerateRequest
from schemas.output import OutputChunk, Usage
from services.runtime.bus import Bus
from services.runtime.generation import generate


@dataclass(slots=True)
class Answer:
    """What came out of one request with one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, chunk: OutputChunk) -> str:
        """Take a chunk and return the text that it adds; raises the error that it ends with."""
        added = ""
        for delta in chunk.choices:
            self.token_ids.extend(delta.token_ids)
            self.finish_reason = delta.finish_reason or self.finish_reason
            added += delta.text
        self.text += added
        self.usage = chunk.usage or self.usage
        if chunk.error is not None:
            raise from_body(chunk.error)
        return added

    def remark(self) -> str:
        """Return what to tell a person who would otherwise see nothing, empty when there is a text."""
        if self.text:
            return ""
        return "The model ended its answer at once; `natterjack chat` asks it as an assistant.\n"

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        usage = self.usage or Usage(prompt_tokens=0, completion_tokens=len(self.token_ids))
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
        }


async def ask(bus: Bus, request: GenerateRequest, accept_timeout_s: float, write: Callable[[str], None]) -> Answer:
    """Run a request to its end, calling `write` with each piece of text; raises its coded error."""
    answer = Answer()
    async with generate(bus, request, accept_timeout_s=accept_timeout_s) as generation:
        async for chunk in generation:
            write(answer.add(chunk))
    return answer


def write_now(text: str) -> None:
    """Write text to stdout at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
