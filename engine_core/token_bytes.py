"""The bytes that each token stands for, which tokens are special, and which end a text. Knows no text encoding.

What a grammar needs to know of a vocabulary. Byte-level BPE files (`tokenizer.ggml.model` = gpt2) are understood.
"""

from dataclasses import dataclass
from pathlib import Path

from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.weights.checkpoint import read_json
from engine_core.weights.gguf import REMEDY, GgufFile, open_gguf

NORMAL_TYPE = 1
CONTROL_TYPES = frozenset({2, 3})
PLAIN_TEXT_TYPES = frozenset({2, 3, 4})
NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`texts[t]` are the bytes of token t; `ends` the tokens that end a text."""

    texts: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]


def read_token_bytes(path: Path | None) -> TokenBytes:
    """Read the vocabulary of a GGUF file or a checkpoint; without one it is that of the 256 bytes and one end.

    Raises ModelError for a vocabulary of another kind.
    """
    if path is None:
        texts = (*(bytes([value]) for value in range(NUM_BYTES)), b"<end>")
        return TokenBytes(texts, frozenset({NUM_BYTES}), (NUM_BYTES,))
    if path.is_dir():
        return checkpoint_token_bytes(path)
    file = open_gguf(path)
    if (kind := file.text("tokenizer.ggml.model")) != "gpt2":
        raise UnsupportedModelError(f"{path}: grammars need a byte-level BPE vocabulary (gpt2), not {kind!r}")
    tokens = [str(token) for token in file.array_values("tokenizer.ggml.tokens")]
    types = [int(kind) for kind in file.array_values("tokenizer.ggml.token_type")]
    if len(types) != len(tokens):
        raise UnsupportedModelError(f"{path}: {len(tokens)} tokens, but {len(types)} token types")
    return TokenBytes(
        texts=tuple(bytes_of(token, kind) for token, kind in zip(tokens, types, strict=True)),
        special=frozenset(token for token, kind in enumerate(types) if kind in CONTROL_TYPES),
        ends=end_tokens(file, len(tokens)),
    )


def end_tokens(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """The model's ends of text and of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    tokens = [file.integer(key) for key in keys if key in file.metadata]
    return tuple(dict.fromkeys(token for token in tokens if 0 <= token < vocab_size))


def checkpoint_token_bytes(directory: Path) -> TokenBytes:
    """Read tokenizer.json; the ends are those that the checkpoint's configurations name."""
    tokenizer = read_json(directory / "tokenizer.json")
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE" or "ByteLevel" not in str(tokenizer.get("decoder")):
        raise UnsupportedModelError(f"{directory}: grammars need a byte-level BPE vocabulary")
    try:
        texts = {index: bytes_of(token, NORMAL_TYPE) for token, index in model["vocab"].items()}
        texts |= {token["id"]: token["content"].encode() for token in added}
        special = frozenset(token["id"] for token in added if token["special"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{directory / 'tokenizer.json'}: not a tokenizer's description; {REMEDY}") from error
    size = max(texts, default=-1) + 1
    return TokenBytes(
        texts=tuple(texts.get(token, b"") for token in range(size)),
        special=special,
        ends=tuple(token for token in checkpoint_ends(directory) if 0 <= token < size),
    )


def checkpoint_ends(directory: Path) -> tuple[int, ...]:
    """The end tokens of generation_config.json and config.json, where there are any."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        given = read_json(path).get("eos_token_id") if path.exists() else None
        ends += given if isinstance(given, list) else [] if given is None else [given]
    return tuple(dict.fromkeys(end for end in ends if type(end) is int))


def printable_bytes() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable Latin-1 as it is, the other bytes from U+0100 on, in order."""
    printable = [value for value in range(NUM_BYTES) if 0x21 <= value <= 0x7E or (value >= 0xA1 and value != 0xAD)]
    others = [value for value in range(NUM_BYTES) if value not in set(printable)]
    stand_ins = {chr(NUM_BYTES + index): value for index, value in enumerate(others)}
    return {chr(value): value for value in printable} | stand_ins


BYTE_OF = printable_bytes()


def bytes_of(token: str, kind: int) -> bytes:
    """A token's bytes: special and added ones are plain text, the others are written in stand-ins."""
    if kind in PLAIN_TEXT_TYPES or any(character not in BYTE_OF for character in token):
        return token.encode()
    return bytes(BYTE_OF[character] for character in token)
