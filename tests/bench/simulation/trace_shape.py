"""The shape of the simulated traffic: conversations that begin at random and share system prompts. Pure.

A conversation begins with one of `num_system_prompts` (the k-th is chosen with weight k^-zipf), says something, gets an
answer, thinks, and goes on with everything said so far as its prompt. Beginnings are a Poisson process.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Lengths in tokens, times in seconds; lengths of messages and answers are log-normal around their medians."""

    num_requests: int
    conversations_per_s: float
    num_system_prompts: int = 500
    system_prompt_len: int = 256
    message_len: int = 40
    answer_len: int = 40
    spread: float = 0.6
    zipf: float = 1.0
    goes_on: float = 0.7
    thinking_s: float = 2.0
    seed: int = 1

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests; {self.conversations_per_s:g} conversations/s, which go on with probability "
            f"{self.goes_on:g} after {self.thinking_s:g} s (exponential); {self.num_system_prompts} system prompts of "
            f"{self.system_prompt_len} tokens (Zipf, exponent {self.zipf:g}); messages of "
            f"{self.message_len} and answers of {self.answer_len} tokens (log-normal medians, sigma {self.spread:g})"
        )


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how long the next answer will be."""

    number: int
    tokens: list[int]
    answer_len: int
    num_turns: int = 0
    executors: list[str] = field(default_factory=list)


class Trace:
    """Draws conversations and their turns; the same seed gives the same ones for the same answers."""

    def __init__(self, shape: TraceShape) -> None:
        self.shape = shape
        self._random = random.Random(shape.seed)
        self._weights = [(number + 1) ** -shape.zipf for number in range(shape.num_system_prompts)]
        self._numbers = range(shape.num_system_prompts)
        self._system_prompts = [self._words(shape.system_prompt_len) for _ in self._numbers]

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE) for _ in range(count)]

    def _length(self, median: int) -> int:
        return max(1, round(median * self._random.lognormvariate(0.0, self.shape.spread)))

    def beginnings(self) -> Iterator[tuple[float, Conversation]]:
        """Yield (time, conversation) for ever, in order of time."""
        now_s, number = 0.0, 0
        while True:
            now_s += self._random.expovariate(self.shape.conversations_per_s)
            [system] = self._random.choices(self._numbers, self._weights)
            conversation = Conversation(number, list(self._system_prompts[system]), 0)
            self.say(conversation)
            yield now_s, conversation
            number += 1

    def say(self, conversation: Conversation) -> None:
        """Add a message to what was said."""
        conversation.tokens += self._words(self._length(self.shape.message_len))
        conversation.answer_len = self._length(self.shape.answer_len)
        conversation.num_turns += 1

    def goes_on_after_s(self) -> float | None:
        """Return how long the thinking takes, None when the conversation is over."""
        if self._random.random() >= self.shape.goes_on:
            return None
        return self._random.expovariate(1 / self.shape.thinking_s)
