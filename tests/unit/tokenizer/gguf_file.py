"""Writes small GGUF files with a vocabulary, right or wrong in one place."""

import struct
from pathlib import Path

Entry = tuple[int, bytes]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def string(value: str | bytes) -> Entry:
    return 8, text(value)


def uint32(value: int) -> Entry:
    return 4, struct.pack("<I", value)


def boolean(value: bool) -> Entry:
    return 7, struct.pack("<?", value)


def strings(values: list[str]) -> Entry:
    return 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def int32s(values: list[int]) -> Entry:
    return 9, struct.pack(f"<IQ{len(values)}i", 5, len(values), *values)


def vocabulary_entries() -> dict[str, Entry]:
    """A byte-level vocabulary of a few tokens: end, begin, an added one, letters, digits and blanks."""
    tokens = ["<end>", "<begin>", "<tool>", "a", "b", "ab", "Ġ", "ĠĠ", "1", "Ã", "©", "é"]
    return {
        "general.architecture": string("llama"),
        "llama.context_length": uint32(64),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("smollm"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": int32s([3, 3, 4] + [1] * 9),
        "tokenizer.ggml.merges": strings(["a b", "Ġ Ġ"]),
        "tokenizer.ggml.bos_token_id": uint32(1),
        "tokenizer.ggml.eos_token_id": uint32(0),
    }


def write(path: Path, entries: dict[str, Entry], *, version: int = 3) -> Path:
    body = b"".join(text(name) + struct.pack("<I", kind) + raw for name, (kind, raw) in entries.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + body)
    return path
