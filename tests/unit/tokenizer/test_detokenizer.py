"""Incremental decoding: nothing broken on the way, nothing lost at the end."""

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.vocabulary import BYTE_VOCABULARY_END, byte_vocabulary

BYTES = byte_vocabulary()


def pieces_of(tokens: list[int], skips: bool = True) -> list[str]:
    detokenizer = Detokenizer(BYTES, skip_special_tokens=skips)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(text=st.text())
def test_complete_text_never_shows_a_replacement_character(text: str) -> None:
    pieces = pieces_of(list(text.encode()))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(raw=st.binary())
def test_any_bytes_joined_equal_decoding_all_at_once(raw: bytes) -> None:
    assert "".join(pieces_of(list(raw))) == raw.decode("utf-8", "replace")


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces_of(list("😀".encode())) == ["", "", "", "😀", ""]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    assert pieces_of([*b"ok", 0xF0, 0x9F]) == ["o", "k", "", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [*b"a", BYTE_VOCABULARY_END, *b"b"]
    assert "".join(pieces_of(tokens)) == "ab"
    assert "".join(pieces_of(tokens, skips=False)) == "a<end>b"


def test_padding_rows_beyond_the_vocabulary_have_no_text() -> None:
    assert "".join(pieces_of([*b"a", 300, *b"b"])) == "ab"
