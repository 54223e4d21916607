"""What the load generator needs from a client, and what both clients are told."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from services.bench.prompts import Prompt
from services.bench.record import RequestRecord


class RequestFailed(Exception):
    """A request did not end well; the message is counted as the reason."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What every request asks besides its prompt.

    `extra` are further fields of the body. `keep_text`: collect the answers' text.
    """

    model: str
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    keep_text: bool = False


class Client(Protocol):
    """Sends one prompt and notes in `record` what comes back."""

    async def run(self, prompt: Prompt, record: RequestRecord) -> None:
        """Return at the end of the answer; raises RequestFailed with the reason."""
