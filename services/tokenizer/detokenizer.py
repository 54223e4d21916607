"""Turns one choice's tokens into text, piece by piece. Pure.

A character whose bytes are spread over tokens appears when it is complete; bytes that never become a character appear
as U+FFFD, at the latest at the end, so the pieces joined are what decoding everything at once gives.
"""

import codecs

from services.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """Incremental decoding of one sequence of tokens."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; tokens beyond the vocabulary (padding rows) have none."""
        if token_id in self._skipped or token_id >= self._vocabulary.size:
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes[token_id])

    def flush(self) -> str:
        """Return what an unfinished character becomes at the end."""
        return self._decoder.decode(b"", final=True)
