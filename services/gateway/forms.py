"""What delivery needs of the way in which an answer is written, and OpenAI's way for chats and completions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.errors import ErrorBody
from schemas.generation import Accepted
from schemas.output import OutputChunk, Usage
from services.gateway.answer import answer_to
from services.gateway.fold import Fold
from services.gateway.frames import EventFrames
from services.gateway.shapes import Shape
from services.gateway.translate import Translation


class Whole(Protocol):
    """An answer that is put together from chunks, each of which comes with the number of its prompt."""

    @property
    def usages(self) -> Sequence[Usage]:
        """Each prompt's token counts, once they are known."""

    def add(self, prompt: int, chunk: OutputChunk) -> None:
        """Take one chunk."""

    def body(self) -> bytes:
        """Return the answer as JSON."""


class Events(Protocol):
    """A streamed answer: what is to be written, as server-sent events."""

    @property
    def usages(self) -> Sequence[Usage]:
        """Each prompt's token counts, once they are known."""

    def begin(self) -> bytes:
        """Return what is written at once, before there is any chunk; b"" leaves the HTTP status open until then."""

    def chunk(self, prompt: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk."""

    def end(self) -> bytes:
        """Return what follows the last chunk."""

    def failure(self, error: ErrorBody) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""

    def keep_alive(self) -> bytes:
        """Return what is written in a long silence."""


class Form(Protocol):
    """One family of endpoints' way of writing the answer to accepted prompts."""

    def fold(self, accepted: Sequence[Accepted]) -> Whole:
        """Return the writer of a whole answer."""

    def events(self, accepted: Sequence[Accepted]) -> Events:
        """Return the writer of a streamed answer."""


@dataclass(frozen=True, slots=True)
class OpenAiForm:
    """/v1/chat/completions and /v1/completions."""

    shape: Shape
    translation: Translation

    def fold(self, accepted: Sequence[Accepted]) -> Whole:
        return Fold(answer_to(self.shape, self.translation, accepted))

    def events(self, accepted: Sequence[Accepted]) -> Events:
        return EventFrames(answer_to(self.shape, self.translation, accepted), self.translation.read)
