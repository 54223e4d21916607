"""The vocabulary read from the GGUF file against two references: transformers, and a BPE written out here.

transformers' own conversion of a GGUF file differs from the model's tokenizer.json in two points, which the tests
state: it knows no `Digits` pre-tokenizer (so blanks before a digit are cut otherwise), and it makes `<|endoftext|>` the
unknown token (so a byte that the vocabulary lacks becomes token 0, where the model's tokenizer has nothing). The first
is put right here; for the second the other reference decides.
"""

import itertools
import json
import string
from functools import cached_property, lru_cache
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

from schemas.generation import ChatMessage
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.vocabulary import Vocabulary, read_vocabulary

GPT2_SPLIT = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SYMBOL_OF_BYTE = bytes_to_unicode()

CORPUS = [
    "The capital of France is Paris. It's what we'll've said; they're John's, I'd say.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n\treturn fib(n - 1) + fib(n - 2)  # O(2**n)\r\n",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 0x1F + 1'000); return 0; }",
    '{"name": "Alice", "age": 30, "x": [1, 2.5e-3, null, true]}',
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x''y' -- comment",
    "😀 🌶️ 👨‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽",
    "你好，世界。这是一个测试。 日本語のテキストとカタカナ 한국어 문장입니다",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "e\u0301 é Z\u0351\u036b\u0343a\u030al\u0334g\u0321o\u0338 ﬁ ﷺ ǅ ẞ",
    "½ ² ³ Ⅷ ٣ ४ ①  ½\u00a0½ 1½",
    "a 12", "a  12", "12  34", "x   1", "3.14159 1,000,000 2024-01-02T03:04:05Z  007",
    "tab\tvertical\vform\fnel\x85nbsp\xa0em\u2003zwsp\u200bbom\ufeffline\u2028end",
    "\x00\x01\x02\x03\x05\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x15\x17\x18\x19\x1a\x1b\x1c\x1e\x1f\x7f",
    "line\n\n\n  line\r\n\r\nline \n \n", " ", "  ", "\n", " \n ", "\t\t  \t",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_end|> z<repo_name>a<file_sep>b<|im_start", "<|im_end|><|im_end|>  <|im_end|>1",
    "\ufffd \ufffe \uffff \U0010fffd private \ue000",
    " " * 10_000, "a" * 10_000, "7" * 10_000, "\n" * 3_000, "ab" * 5_000, "é" * 3_000, "😀" * 1_000, " 1" * 3_000,
    "".join(string.printable) * 20,
]  # fmt: skip

LACKING = ["\x04", "\x06a\x13b\x14", "a\x16 \x1d1", "\x04 \x04 \x04", "x\U00040000y", "\U000c0000\U00100000 z"]
"""Texts with bytes that this vocabulary lacks: 04 06 13 14 16 1d, and the first bytes f1 f2 of rare planes."""


class WrittenOutBpe:
    """Byte-level BPE by the book (Sennrich et al. 2016, GPT-2's byte table) for one tokenizer.json's vocabulary."""

    def __init__(self, tokenizer_json: str) -> None:
        parsed = json.loads(tokenizer_json)
        self.vocabulary: dict[str, int] = parsed["model"]["vocab"]
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in parsed["model"]["merges"])
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(pairs)}
        self.special = {token["content"]: token["id"] for token in parsed["added_tokens"]}
        self.bpe = lru_cache(100_000)(self._bpe)

    @cached_property
    def special_pattern(self) -> "regex.Pattern[str]":
        longest_first = sorted(self.special, key=len, reverse=True)
        return regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.special_pattern.split(text):
            if piece in self.special:
                ids.append(self.special[piece])
                continue
            for part in regex.split(r"(\p{N})", piece):  # every digit stands alone
                for word in GPT2_SPLIT.findall(part):
                    ids += self.bpe("".join(SYMBOL_OF_BYTE[byte] for byte in word.encode()))
        return ids

    def _bpe(self, word: str) -> list[int]:
        symbols = [symbol for symbol in word if symbol in self.vocabulary]
        while len(symbols) > 1:
            best = min(itertools.pairwise(symbols), key=lambda pair: self.ranks.get(pair, 1 << 40))
            if best not in self.ranks:
                break
            merged, position = [], 0
            while position < len(symbols):
                is_pair = tuple(symbols[position : position + 2]) == best
                merged.append("".join(best) if is_pair else symbols[position])
                position += 2 if is_pair else 1
            symbols = merged
        return [self.vocabulary[symbol] for symbol in symbols]


@pytest.fixture(scope="module")
def vocabulary(model_path: Path) -> Vocabulary:
    return read_vocabulary(model_path)


@pytest.fixture(scope="module")
def converted(model_path: Path) -> AutoTokenizer:
    """transformers' conversion of the same file, as it is."""
    return AutoTokenizer.from_pretrained(str(model_path.parent), gguf_file=model_path.name)


@pytest.fixture(scope="module")
def reference(converted: AutoTokenizer) -> WrittenOutBpe:
    return WrittenOutBpe(converted.backend_tokenizer.to_str())


@pytest.fixture(scope="module")
def lacking(vocabulary: Vocabulary) -> frozenset[int]:
    """Bytes that the vocabulary has no token for."""
    symbols = vocabulary.tokenizer.get_vocab()
    return frozenset(byte for byte, symbol in SYMBOL_OF_BYTE.items() if symbol not in symbols)


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return list(vocabulary.encode(text, add_special_tokens=True))  # SmolLM2 puts nothing before a prompt


def converted_ids(converted: AutoTokenizer, text: str, pre_tokenizer: object) -> list[int]:
    backend = converted.backend_tokenizer
    original, backend.pre_tokenizer = backend.pre_tokenizer, pre_tokenizer
    try:
        return backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.pre_tokenizer = original


def test_conversion_of_transformers_differs_in_digits_and_unknown_bytes_only(
    vocabulary: Vocabulary, converted: AutoTokenizer
) -> None:
    assert converted.encode("a  12", add_special_tokens=False) == [81, 216, 216, 33, 34]
    assert ids_of(vocabulary, "a  12") == [81, 256, 33, 34]  # "a", two blanks, "1", "2"
    assert converted.encode("\x04a", add_special_tokens=False) == [0, 81]
    assert ids_of(vocabulary, "\x04a") == [81]


def test_token_ids_equal_transformers_over_the_corpus(vocabulary: Vocabulary, converted: AutoTokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    complete = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in CORPUS:
        assert ids_of(vocabulary, text) == converted_ids(converted, text, complete), text[:60]


def test_token_ids_equal_bpe_written_out_over_the_corpus(vocabulary: Vocabulary, reference: WrittenOutBpe) -> None:
    for text in [*CORPUS, *LACKING, "".join(CORPUS)[:60_000]]:
        assert ids_of(vocabulary, text) == reference.encode(text), text[:60]


fragments = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text(alphabet=string.printable, max_size=12),
        st.sampled_from([" ", "  ", "\n", "1", "٣", "'s", "'LL", "😀", "\u0301", "<|im_end|>", "<|im", "\x04", "\r\n"]),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=fragments)
def test_token_ids_equal_bpe_written_out_for_any_text(
    vocabulary: Vocabulary, reference: WrittenOutBpe, text: str
) -> None:
    assert ids_of(vocabulary, text) == reference.encode(text)


@settings(max_examples=100, deadline=None)
@given(text=fragments)
def test_encoding_then_decoding_gives_the_text_but_for_lacking_bytes(
    vocabulary: Vocabulary, lacking: frozenset[int], text: str
) -> None:
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    decoded = "".join(detokenizer.feed(token) for token in ids_of(vocabulary, text)) + detokenizer.flush()
    assert decoded == bytes(byte for byte in text.encode() if byte not in lacking).decode("utf-8", "replace")


def test_bytes_of_tokens_equal_transformers(vocabulary: Vocabulary, converted: AutoTokenizer) -> None:
    byte_of_symbol = {symbol: byte for byte, symbol in SYMBOL_OF_BYTE.items()}
    for token_id, token in enumerate(converted.convert_ids_to_tokens(list(range(vocabulary.size)))):
        assert vocabulary.token_bytes[token_id] == bytes(byte_of_symbol[symbol] for symbol in token)
    assert vocabulary.special_token_ids == set(converted.all_special_ids) | set(converted.added_tokens_decoder)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), skips=st.booleans())
def test_pieces_joined_equal_decoding_all_at_once(
    vocabulary: Vocabulary, converted: AutoTokenizer, data: st.DataObject, skips: bool
) -> None:
    broken = [187, 249, 242, 218, 230, 131, *vocabulary.special_token_ids]  # parts of characters, special tokens
    token = st.one_of(st.integers(0, vocabulary.size - 1), st.sampled_from(broken))
    tokens = data.draw(st.lists(token, max_size=40))
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skips)
    pieces = [detokenizer.feed(token) for token in tokens] + [detokenizer.flush()]
    assert "".join(pieces) == vocabulary.tokenizer.decode(tokens, skip_special_tokens=skips)


def test_chat_prompt_equals_transformers(vocabulary: Vocabulary, converted: AutoTokenizer) -> None:
    turns = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi  12 😀"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert vocabulary.chat_template is not None
    template = ChatTemplate(vocabulary.chat_template, vocabulary.template_tokens)
    for conversation in (turns, turns[1:], turns[:1], turns[2:3]):
        expected = converted.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        messages = tuple(ChatMessage.model_validate(turn) for turn in conversation)
        rendered = template.render(messages, add_generation_prompt=True, continue_final_message=False)
        assert rendered == expected
