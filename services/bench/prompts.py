"""The data sets of a benchmark: which prompts are sent, and how long their answers are to be. Every draw is seeded.

Knows no tokenizer: the length of a prompt is in tokens where it is made of token ids, and in words where it is text.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.bench.sentences import natural_prompt

Dataset = Literal["words", "random", "shared-prefix", "file"]

FIRST_PLAIN_TOKEN = 32
"""Vocabularies begin with special tokens and control characters; random ids start above them.

By default they end below 127: for a vocabulary of bytes that is printable text, of which no piece is held back because
a character is not complete.
"""


class DatasetError(Exception):
    """The data set cannot be made; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input (text, token ids, or the messages of a conversation) and the length of its answer."""

    content: str | tuple[int, ...]
    max_tokens: int
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class DatasetChoice:
    """Which prompts to make.

    `range_ratio` r draws each length evenly from length·(1 ± r), 0 ≤ r < 1. Lengths are in tokens, but `input_len` is
    in words for the data set `words`.
    """

    dataset: Dataset = "words"
    num_prompts: int = 100
    input_len: int = 90
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 256
    num_prefixes: int = 1
    vocab_size: int = 127
    file: Path | None = None
    seed: int = 0


def make_prompts(choice: DatasetChoice) -> list[Prompt]:
    """Return the prompts in the order in which they are sent; raises DatasetError."""
    if not 0 <= choice.range_ratio < 1:
        raise DatasetError("The range ratio must be at least 0 and below 1.")
    if choice.dataset in ("random", "shared-prefix") and choice.vocab_size <= FIRST_PLAIN_TOKEN:
        raise DatasetError(f"Token ids are drawn from {FIRST_PLAIN_TOKEN} on: the vocabulary size must be larger.")
    return MAKERS[choice.dataset](choice)


def _words(choice: DatasetChoice) -> list[Prompt]:
    rng = random.Random(choice.seed)  # noqa: S311 (to be drawn again, not to be secret)
    return [
        Prompt(natural_prompt(rng, _length(rng, choice.input_len, choice)), _output_len(rng, choice))
        for _ in range(choice.num_prompts)
    ]


def _random(choice: DatasetChoice) -> list[Prompt]:
    rng = random.Random(choice.seed)  # noqa: S311 (to be drawn again, not to be secret)
    return [
        Prompt(_ids(rng, _length(rng, choice.input_len, choice), choice), _output_len(rng, choice))
        for _ in range(choice.num_prompts)
    ]


def _shared_prefix(choice: DatasetChoice) -> list[Prompt]:
    """Prefixes take turns, so that each is in use at the same time."""
    rng = random.Random(choice.seed)  # noqa: S311 (to be drawn again, not to be secret)
    prefixes = [_ids(rng, choice.prefix_len, choice) for _ in range(choice.num_prefixes)]
    return [
        Prompt(
            prefixes[number % choice.num_prefixes] + _ids(rng, _length(rng, choice.input_len, choice), choice),
            _output_len(rng, choice),
        )
        for number in range(choice.num_prompts)
    ]


def _from_file(choice: DatasetChoice) -> list[Prompt]:
    """The file's prompts in order, from its beginning again when it has too few."""
    if choice.file is None:
        raise DatasetError("Name the file with --dataset-file: one JSON object a line, with 'prompt' or 'messages'.")
    try:
        lines = choice.file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DatasetError(f"Cannot read {choice.file}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{choice.file} is not UTF-8 text.") from None
    prompts = list(_parsed(lines, choice))
    if not prompts:
        raise DatasetError(f"{choice.file} holds no prompt.")
    return [prompts[number % len(prompts)] for number in range(choice.num_prompts)]


def _parsed(lines: list[str], choice: DatasetChoice) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _parsed_line(json.loads(line), choice.output_len)
            except (ValueError, TypeError, KeyError):
                raise DatasetError(
                    f"{choice.file}, line {number}: write a JSON object with 'prompt' (text or token ids) or "
                    "'messages', and 'max_tokens' if it differs."
                ) from None


def _parsed_line(entry: Any, output_len: int) -> Prompt:
    if not isinstance(entry, dict):
        raise TypeError
    asked: Any = entry.get("max_tokens", entry.get("output_tokens", output_len))
    max_tokens = int(asked)
    if max_tokens < 1:
        raise ValueError
    if "messages" in entry:
        return Prompt("", max_tokens, tuple(dict(message) for message in entry["messages"]))
    prompt = entry["prompt"]
    if isinstance(prompt, str):
        return Prompt(prompt, max_tokens)
    return Prompt(tuple(int(token) for token in prompt), max_tokens)


MAKERS = {"words": _words, "random": _random, "shared-prefix": _shared_prefix, "file": _from_file}


def _length(rng: random.Random, mean: int, choice: DatasetChoice) -> int:
    spread = int(mean * choice.range_ratio)
    return max(1, rng.randint(mean - spread, mean + spread))


def _output_len(rng: random.Random, choice: DatasetChoice) -> int:
    return _length(rng, choice.output_len, choice)


def _ids(rng: random.Random, count: int, choice: DatasetChoice) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_PLAIN_TOKEN, choice.vocab_size) for _ in range(count))
