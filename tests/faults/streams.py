"""Streams whose every token is known in advance, read as a client reads them. Knows nothing of faults."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import NatterjackError
from schemas.generation import GenerateRequest
from schemas.output import TokenText
from services.runtime.bus import Bus
from services.runtime.generation import generate

STREAM_TIMEOUT_S = 90.0


@dataclass
class Stream:
    """One request, what it should say by choice, and what it said."""

    request: GenerateRequest
    expected: dict[int, str]
    text: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[TokenText] = field(default_factory=list)
    num_final: int = 0
    problem: str = ""
    longest_silence_s: float = 0.0
    is_begun: bool = False
    expected_tokens: dict[int, list[int]] | None = None
    expected_logprobs: list[TokenText] | None = None

    async def run(self, bus: Bus) -> None:
        """Send the request and read to its end; `problem` tells what is not as it should be."""
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await self._read(bus)
        except TimeoutError:
            self.problem = f"hung after {sum(map(len, self.text.values()))} characters"
        except NatterjackError as error:
            self.problem = f"refused: {error.message}"
        if not self.problem:
            self.problem = self._compare()

    async def _read(self, bus: Bus) -> None:
        before_s = time.monotonic()
        async with generate(bus, self.request, accept_timeout_s=30) as generation:
            async for chunk in generation:
                now_s = time.monotonic()
                self.is_begun = True
                self.longest_silence_s = max(self.longest_silence_s, now_s - before_s)
                before_s = now_s
                self.num_final += chunk.final
                if chunk.error is not None:
                    self.problem = f"error: {chunk.error.message}"
                for delta in chunk.choices:
                    tokens = self.tokens.setdefault(delta.index, [])
                    if delta.start != len(tokens):
                        self.problem = f"token {delta.start} came after {len(tokens)}"
                    tokens.extend(delta.token_ids)
                    self.text[delta.index] = self.text.get(delta.index, "") + delta.text
                    self.logprobs += delta.logprobs or ()

    def again(self) -> "Stream":
        """Return the same request, not yet sent."""
        return Stream(
            self.request,
            self.expected,
            expected_tokens=self.expected_tokens,
            expected_logprobs=self.expected_logprobs,
        )

    def _compare(self) -> str:
        if self.num_final != 1:
            return f"{self.num_final} final chunks"
        if self.text != self.expected:
            return f"said {self.text!r:.200} instead of {self.expected!r:.200}"
        if self.expected_tokens is not None and self.tokens != self.expected_tokens:
            return f"generated {self.tokens!r:.200} instead of {self.expected_tokens!r:.200}"
        if self.expected_logprobs is not None:
            return "" if self.logprobs == self.expected_logprobs else "other logprobs"
        if self.request.logprobs is not None and len(self.logprobs) != sum(map(len, self.tokens.values())):
            return f"{len(self.logprobs)} logprobs"
        return ""


def echo_streams(numbers: Iterable[int], num_tokens: int) -> list[Stream]:
    """Return streams of about `num_tokens` tokens: plain, with logprobs, with two choices, with a stop string."""
    return [_echo_stream(number, num_tokens + number % 37) for number in numbers]


def _echo_stream(number: int, num_tokens: int) -> Stream:
    prompt = f"stream {number} repeats; "
    options: dict[str, Any] = {"temperature": 0, "stop": ("never",)}
    expected = {0: echo(prompt, num_tokens)}
    match number % 4:
        case 1:
            options = {"temperature": 0, "logprobs": 1}
        case 2:
            options = {"temperature": 1, "n": 2, "seed": number}
            expected |= {1: expected[0]}
        case 3:
            prompt = f"{echo(prompt, num_tokens)}HALT"
            options = {"temperature": 0, "stop": ("xyz", "HALT")}
    limit = 4 * num_tokens if number % 4 == 3 else num_tokens
    request = GenerateRequest(model="smol", prompt=prompt, max_tokens=limit, **options)
    return Stream(request, expected)


SUBJECTS = ("a toad", "the moon", "bread", "a small town by the sea", "winter", "an old clock")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1, "n": 2, "stop": (" and the", "\n\n")},
)


async def model_streams(bus: Bus, numbers: Iterable[int], num_tokens: int) -> list[Stream]:
    """Return streams for a real model; what they should say is what they say here, undisturbed and together."""
    requests = [
        GenerateRequest(
            model="smol",
            prompt=f"Story number {number} is about {SUBJECTS[number % len(SUBJECTS)]}.",
            max_tokens=num_tokens,
            seed=number,
            ignore_eos=number % 3 == 0,
            **OPTIONS[number % len(OPTIONS)],
        )
        for number in numbers
    ]
    rehearsals = [Stream(request, {}) for request in requests]
    await asyncio.gather(*(stream.run(bus) for stream in rehearsals))
    broken = [stream.problem for stream in rehearsals if not stream.problem.startswith("said")]
    if broken:
        raise RuntimeError(f"undisturbed: {broken}")
    return [
        Stream(stream.request, stream.text, expected_tokens=stream.tokens, expected_logprobs=stream.logprobs)
        for stream in rehearsals
    ]


def echo(prompt: str, num_tokens: int) -> str:
    """What the echo engine says: the prompt, again and again."""
    return (prompt * (num_tokens // len(prompt) + 1))[:num_tokens]
