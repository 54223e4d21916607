"""Grammars over the vocabulary of bytes, for tests: where text is its own tokens."""

import atexit

from llguidance import LLMatcher

from services.tokenizer.grammar_check import GrammarCheck
from services.tokenizer.grammar_worker import tokenizer_of
from services.tokenizer.vocabulary import byte_vocabulary

BYTES = byte_vocabulary()
CHECK = GrammarCheck(BYTES, is_enabled=True)
atexit.register(CHECK.close)
TOKENIZER = tokenizer_of(list(BYTES.token_bytes), BYTES.special_token_ids, list(BYTES.end_token_ids))


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar takes exactly this text."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
