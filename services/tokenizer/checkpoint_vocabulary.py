"""The vocabulary of a Hugging Face checkpoint: tokenizer.json and its companions. Knows no requests.

What the `tokenizers` library reads from tokenizer.json is used as it is; byte-level BPE is supported. Chat template,
context length and end tokens stand in the other files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.tokenizer.vocabulary import BYTE_OF_SYMBOL, Vocabulary, VocabularyError, read_vocabulary

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MODEL_CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def open_vocabulary(path: Path) -> Vocabulary:
    """Build the vocabulary from a GGUF file or from a checkpoint's directory; raises VocabularyError."""
    return read_checkpoint_vocabulary(path) if path.is_dir() else read_vocabulary(path)


def read_checkpoint_vocabulary(directory: Path) -> Vocabulary:
    """Build the vocabulary from the files in `directory`; raises VocabularyError."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises nothing more exact
        raise VocabularyError(f"{directory / TOKENIZER} is not readable: {str(error)[:200]}. Fetch it again.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = _read_json(directory / TOKENIZER)
    if "ByteLevel" not in json.dumps(described.get("decoder")):
        raise VocabularyError(f"The vocabulary of {directory.name} is not byte-level BPE. Choose another model.")
    config, options = _read_json(directory / MODEL_CONFIG), _read_json(directory / TOKENIZER_CONFIG)
    context_length = config.get("max_position_embeddings")
    if type(context_length) is not int or context_length < 1:
        raise VocabularyError(f"{directory / MODEL_CONFIG} does not tell the model's context length. Fetch it again.")
    begin, end = _text_of(options.get("bos_token")), _text_of(options.get("eos_token"))
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        tokenizer=tokenizer,
        token_bytes=_token_bytes(tokenizer),
        special_token_ids=frozenset(index for index, token in added.items() if token.special),
        end_token_ids=_ends(directory, tokenizer, config, end),
        prefix_token_ids=_prefix(tokenizer, begin if options.get("add_bos_token") is True else None),
        chat_template=_chat_template(directory, options),
        template_tokens={"bos_token": begin or "", "eos_token": end or ""},
        context_length=context_length,
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a file, nothing where there is no file; raises VocabularyError."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise VocabularyError(f"{path} is not readable as JSON: {str(error)[:200]}. Fetch it again.") from None
    if not isinstance(values, dict):
        raise VocabularyError(f"{path} is not a JSON object. Fetch it again.")
    return values


def _token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Added tokens are plain text, the others are written in stand-ins for bytes; a gap in the ids has no bytes."""
    texts = {index: _bytes_of(text) for text, index in tokenizer.get_vocab(with_added_tokens=False).items()}
    texts |= {index: token.content.encode() for index, token in tokenizer.get_added_tokens_decoder().items()}
    return tuple(texts.get(index, b"") for index in range(max(texts, default=-1) + 1))


def _bytes_of(text: str) -> bytes:
    if any(symbol not in BYTE_OF_SYMBOL for symbol in text):
        return text.encode()
    return bytes(BYTE_OF_SYMBOL[symbol] for symbol in text)


def _text_of(token: object) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ends(directory: Path, tokenizer: Tokenizer, config: Mapping[str, Any], end: str | None) -> tuple[int, ...]:
    """What ends a turn: by the generation's and the model's configuration, and by the tokenizer's."""
    named: list[object] = []
    for given in (_read_json(directory / GENERATION_CONFIG).get("eos_token_id"), config.get("eos_token_id")):
        named += given if isinstance(given, list) else [given]
    named.append(None if end is None else tokenizer.token_to_id(end))
    size = tokenizer.get_vocab_size()
    return tuple(dict.fromkeys(token for token in named if isinstance(token, int) and 0 <= token < size))


def _prefix(tokenizer: Tokenizer, begin: str | None) -> tuple[int, ...]:
    """What the tokenizer puts before a plain prompt, or the begin token where only the configuration asks for it."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    prefix = tuple(whole[: len(whole) - len(bare)]) if whole[len(whole) - len(bare) :] == bare else ()
    first = None if begin is None else tokenizer.token_to_id(begin)
    return prefix if prefix or first is None else (first,)


def _chat_template(directory: Path, options: Mapping[str, Any]) -> str | None:
    """A file of its own, or a text, or the default one of several that have names."""
    path = directory / CHAT_TEMPLATE
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise VocabularyError(f"{path} is not readable: {error}. Fetch it again.") from None
    given = options.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None
