"""The model's vocabulary: text to tokens and tokens to bytes, built from the model file itself. Knows no requests.

Byte-level BPE (`tokenizer.ggml.model` = gpt2) is supported; the pre-tokenizer is chosen by name from a table. Some
vocabularies lack single bytes: as in the model's own tokenizer, a character made only of such bytes encodes to nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.tokenizer.gguf_metadata import MetadataError, Value, read_metadata

NORMAL_TOKEN_TYPE = 1
CONTROL_TOKEN_TYPES = frozenset({2, 3})
USER_DEFINED_TOKEN_TYPE = 4
BYTE_VOCABULARY_END = 256
BYTE_VOCABULARY_CONTEXT = 8192
BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


class VocabularyError(Exception):
    """The vocabulary in the model file cannot be used; the message says why."""


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "qwen2": lambda: _split(QWEN2_SPLIT),
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
}
"""`tokenizer.ggml.pre` → how text is cut before the merges."""

COMPOSES_CHARACTERS = frozenset({"qwen2"})
"""Pre-tokenizers whose models bring text into Unicode's form C first."""

IGNORES_MERGES = frozenset({"llama-bpe"})
"""Pre-tokenizers whose models take a word that is a token as it is, whatever the merges would make of it."""


@dataclass(frozen=True)
class Vocabulary:
    """Encodes and decodes for one model; immutable, so threads may share it.

    `context_length` is the model's own, in tokens. `end_token_ids` are the model's ends of turn. `prefix_token_ids` are
    put before a plain prompt unless it asks for none.
    """

    tokenizer: Tokenizer
    token_bytes: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    end_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...]
    chat_template: str | None
    template_tokens: dict[str, str]
    context_length: int

    @cached_property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of `text`; special tokens written out in it are recognised, as model tokenizers do."""
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return self.prefix_token_ids + ids if add_special_tokens else ids


def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of the 256 bytes and one end token, for an engine without a model."""
    symbols = _symbol_of_byte()
    vocabulary = {symbols[value]: value for value in range(256)} | {"<end>": BYTE_VOCABULARY_END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = _byte_level(use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return Vocabulary(
        tokenizer=tokenizer,
        token_bytes=(*(bytes([value]) for value in range(256)), b"<end>"),
        special_token_ids=frozenset({BYTE_VOCABULARY_END}),
        end_token_ids=(BYTE_VOCABULARY_END,),
        prefix_token_ids=(),
        chat_template=BYTE_CHAT_TEMPLATE,
        template_tokens={"bos_token": "", "eos_token": "<end>"},
        context_length=BYTE_VOCABULARY_CONTEXT,
    )


def read_vocabulary(path: Path) -> Vocabulary:
    """Build the vocabulary from a GGUF file; raises VocabularyError."""
    try:
        fields = _Fields(read_metadata(path))
    except (OSError, MetadataError) as error:
        raise VocabularyError(f"{path} is not a readable GGUF file: {error}. Fetch it again.") from None
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise VocabularyError(
            f"The vocabulary kind {kind!r} of {path.name} is not supported; byte-level BPE (gpt2) is. "
            "Choose another model."
        )
    return _byte_level_vocabulary(fields, path.name)


class _Fields:
    """Typed access to a GGUF file's metadata; a value of another type counts as absent."""

    def __init__(self, entries: dict[str, Value]) -> None:
        self._entries = entries

    def value(self, name: str) -> Value | None:
        return self._entries.get(name)

    def text(self, name: str) -> str | None:
        value = self.value(name)
        return value if isinstance(value, str) else None

    def number(self, name: str) -> int | None:
        value = self.value(name)
        return int(value) if isinstance(value, int) else None

    def numbers(self, name: str) -> list[int]:
        value = self.value(name)
        return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []

    def texts(self, name: str) -> list[str]:
        value = self.value(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _byte_level_vocabulary(fields: _Fields, name: str) -> Vocabulary:
    tokens, types = fields.texts("tokenizer.ggml.tokens"), fields.numbers("tokenizer.ggml.token_type")
    merges = _merges(fields, frozenset(tokens))
    types = types or [NORMAL_TOKEN_TYPE] * len(tokens)
    if not tokens or not merges or len(types) != len(tokens):
        raise VocabularyError(f"{name} has no complete vocabulary (tokens, types and merges). Fetch the file again.")
    special = [index for index, kind in enumerate(types) if kind in CONTROL_TOKEN_TYPES]
    added = [index for index, kind in enumerate(types) if kind == USER_DEFINED_TOKEN_TYPE]
    begin, end, end_of_turn = (_token_id(fields, kind, len(tokens)) for kind in ("bos", "eos", "eot"))
    adds_begin = begin is not None and bool(fields.value("tokenizer.ggml.add_bos_token"))
    context_length = fields.number(f"{fields.text('general.architecture')}.context_length") or 0
    if context_length < 1:
        raise VocabularyError(f"{name} does not tell the model's context length. Fetch the file again.")
    return Vocabulary(
        tokenizer=_build_tokenizer(fields, tokens, merges, special, added),
        token_bytes=tuple(_bytes_of(text, kind) for text, kind in zip(tokens, types, strict=True)),
        special_token_ids=frozenset(special),
        end_token_ids=tuple(dict.fromkeys(token for token in (end, end_of_turn) if token is not None)),
        prefix_token_ids=(begin,) if adds_begin and begin is not None else (),
        chat_template=fields.text("tokenizer.chat_template"),
        template_tokens={
            "bos_token": tokens[begin] if begin is not None else "",
            "eos_token": tokens[end] if end is not None else "",
        },
        context_length=context_length,
    )


def _merges(fields: _Fields, tokens: frozenset[str]) -> list[tuple[str, str]]:
    """Return the pairs in order of rank; raises VocabularyError where one is not of tokens."""
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not tokens.issuperset((left, right, left + right)):
            raise VocabularyError(f"The merge {merge[:40]!r} is not of the vocabulary's tokens. Fetch the file again.")
        merges.append((left, right))
    return merges


def _token_id(fields: _Fields, kind: str, num_tokens: int) -> int | None:
    """Return the special token called bos, eos or eot; raises VocabularyError when it is no token."""
    token_id = fields.number(f"tokenizer.ggml.{kind}_token_id")
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise VocabularyError(f"The {kind} token {token_id} is not in the vocabulary. Fetch the file again.")
    return token_id


def _build_tokenizer(
    fields: _Fields, tokens: list[str], merges: list[tuple[str, str]], special: list[int], added: list[int]
) -> Tokenizer:
    pre = fields.text("tokenizer.ggml.pre") or "default"
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise VocabularyError(f"The pre-tokenizer {pre!r} is not supported (known: {known}). Choose another model.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in IGNORES_MERGES))
    if pre in COMPOSES_CHARACTERS:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    tokenizer.add_tokens([AddedToken(tokens[index], special=False, normalized=False) for index in added])
    return tokenizer


def _symbol_of_byte() -> dict[int, str]:
    """GPT-2's table of printable stand-ins for bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {value: chr(value if value in printable else next(others)) for value in range(256)}


BYTE_OF_SYMBOL = {symbol: value for value, symbol in _symbol_of_byte().items()}


def _bytes_of(text: str, kind: int) -> bytes:
    """Return a token's bytes; special and added tokens are plain text, others are written in stand-ins."""
    if kind in CONTROL_TOKEN_TYPES or kind == USER_DEFINED_TOKEN_TYPE or any(c not in BYTE_OF_SYMBOL for c in text):
        return text.encode()
    return bytes(BYTE_OF_SYMBOL[symbol] for symbol in text)
