"""The vocabulary of a GGUF file: what it gives, and how a wrong file is refused."""

import contextlib
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.tokenizer.gguf_metadata import MetadataError, read_metadata
from services.tokenizer.vocabulary import PRE_TOKENIZERS, VocabularyError, byte_vocabulary, read_vocabulary
from tests.unit.tokenizer.gguf_file import Entry, boolean, int32s, string, strings, uint32, vocabulary_entries, write


@pytest.fixture
def entries() -> dict[str, Entry]:
    return vocabulary_entries()


def test_small_vocabulary_encodes_and_knows_its_special_tokens(tmp_path: Path, entries: dict[str, Entry]) -> None:
    vocabulary = read_vocabulary(write(tmp_path / "m.gguf", entries))
    assert vocabulary.encode("ab  1<end><tool>b", add_special_tokens=True) == (5, 7, 8, 0, 2, 4)
    assert (vocabulary.size, vocabulary.context_length) == (12, 64)
    assert (vocabulary.special_token_ids, vocabulary.end_token_ids) == (frozenset({0, 1}), (0,))
    assert vocabulary.token_bytes[7] == b"  "
    assert vocabulary.token_bytes[9] == b"\xc3"
    assert vocabulary.template_tokens == {"bos_token": "<begin>", "eos_token": "<end>"}


def test_begin_token_is_put_before_a_plain_prompt_only_when_asked(tmp_path: Path, entries: dict[str, Entry]) -> None:
    entries["tokenizer.ggml.add_bos_token"] = boolean(True)
    entries["tokenizer.ggml.eot_token_id"] = uint32(2)
    vocabulary = read_vocabulary(write(tmp_path / "m.gguf", entries))
    assert vocabulary.encode("a", add_special_tokens=True) == (1, 3)
    assert vocabulary.encode("a", add_special_tokens=False) == (3,)
    assert vocabulary.end_token_ids == (0, 2)


def test_version_2_and_a_file_without_token_types_are_read(tmp_path: Path, entries: dict[str, Entry]) -> None:
    del entries["tokenizer.ggml.token_type"]
    vocabulary = read_vocabulary(write(tmp_path / "m.gguf", entries, version=2))
    assert vocabulary.special_token_ids == frozenset()


def test_qwen2_composes_characters_and_smollm_does_not(tmp_path: Path, entries: dict[str, Entry]) -> None:
    composed = (9, 10)  # the two bytes of é
    assert read_vocabulary(write(tmp_path / "m.gguf", entries)).encode("e\u0301", add_special_tokens=False) == ()
    entries["tokenizer.ggml.pre"] = string("qwen2")
    assert read_vocabulary(write(tmp_path / "m.gguf", entries)).encode("e\u0301", add_special_tokens=False) == composed


def test_llama_takes_a_word_that_is_a_token_whatever_the_merges_say(tmp_path: Path, entries: dict[str, Entry]) -> None:
    entries["tokenizer.ggml.merges"] = strings(["Ġ Ġ"])
    assert read_vocabulary(write(tmp_path / "m.gguf", entries)).encode("ab", add_special_tokens=False) == (3, 4)
    entries["tokenizer.ggml.pre"] = string("llama-bpe")
    assert read_vocabulary(write(tmp_path / "m.gguf", entries)).encode("ab", add_special_tokens=False) == (5,)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_can_be_built(tmp_path: Path, entries: dict[str, Entry], pre: str) -> None:
    entries["tokenizer.ggml.pre"] = string(pre)
    assert read_vocabulary(write(tmp_path / "m.gguf", entries)).encode("ab ab1", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("tokenizer.ggml.model", string("llama"), "kind 'llama' of m.gguf is not supported"),
        ("tokenizer.ggml.model", None, "kind None"),
        ("tokenizer.ggml.model", uint32(1), "kind None"),
        ("tokenizer.ggml.pre", string("strange"), "pre-tokenizer 'strange' is not supported .known: default"),
        ("tokenizer.ggml.tokens", None, "not of the vocabulary"),
        ("tokenizer.ggml.merges", None, "no complete vocabulary"),
        ("tokenizer.ggml.token_type", int32s([1, 1]), "no complete vocabulary"),
        ("tokenizer.ggml.merges", strings(["a x"]), "merge 'a x' is not of the vocabulary"),
        ("tokenizer.ggml.merges", strings(["ab"]), "merge 'ab' is not of the vocabulary"),
        ("tokenizer.ggml.merges", strings(["b a"]), "merge 'b a' is not of the vocabulary"),
        ("tokenizer.ggml.bos_token_id", uint32(12), "bos token 12 is not in the vocabulary"),
        ("tokenizer.ggml.eos_token_id", uint32(2**32 - 1), "eos token 4294967295 is not in the vocabulary"),
        ("llama.context_length", None, "does not tell the model's context length"),
        ("general.architecture", string(b"\xff"), "not UTF-8"),
        ("general.name", (99, b""), "unknown type 99"),
        ("general.name", (9, struct.pack("<IQ", 4, 2**40) + b"\0" * 64), "ends inside its header"),
        ("general.name", (9, struct.pack("<IQ", 8, 2**63) + b"\0" * 64), "ends inside its header"),
        ("general.name", (9, struct.pack("<IQIQ", 9, 1, 4, 1) + b"\0" * 4), "unknown type 9"),
    ],
)
def test_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, entries: dict[str, Entry], name: str, entry: Entry | None, message: str
) -> None:
    if entry is None:
        del entries[name]
    else:
        entries[name] = entry
    with pytest.raises(VocabularyError, match=message):
        read_vocabulary(write(tmp_path / "m.gguf", entries))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty"),
        (b"GGML", "does not begin as a GGUF file"),
        (b"GGUF", "ends inside"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "ends inside"),
        (b"<!doctype html>", "does not begin as a GGUF file"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(VocabularyError, match=message):
        read_vocabulary(tmp_path / "m.gguf")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="not a readable GGUF file"):
        read_vocabulary(tmp_path / "absent.gguf")


def test_file_truncated_anywhere_is_refused(tmp_path: Path, entries: dict[str, Entry]) -> None:
    raw = write(tmp_path / "m.gguf", entries).read_bytes()
    for size in range(len(raw)):
        (tmp_path / "cut.gguf").write_bytes(raw[:size])
        with pytest.raises(MetadataError):
            read_metadata(tmp_path / "cut.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_corrupt_file_is_refused_or_read_but_never_crashes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(write(tmp_path / "m.gguf", vocabulary_entries()).read_bytes())
    for position, value in changes:
        raw[position % len(raw)] = value
    (tmp_path / "m.gguf").write_bytes(raw)
    with contextlib.suppress(VocabularyError):
        read_vocabulary(tmp_path / "m.gguf").encode("ab  1", add_special_tokens=True)


def test_metadata_of_the_model_equals_the_gguf_package(model_path: Path) -> None:
    metadata = read_metadata(model_path)
    fields = {name: field for name, field in GGUFReader(model_path).fields.items() if not name.startswith("GGUF.")}
    assert metadata.keys() == fields.keys()
    for name, field in fields.items():
        if len(field.data) < 1000:
            assert metadata[name] == field.contents()
    tokens = fields["tokenizer.ggml.tokens"]
    assert metadata["tokenizer.ggml.tokens"] == [str(bytes(tokens.parts[i]), "utf-8") for i in tokens.data]


def test_default_model_has_its_size_context_and_end(model_path: Path) -> None:
    vocabulary = read_vocabulary(model_path)
    assert (vocabulary.size, vocabulary.context_length, vocabulary.end_token_ids) == (49152, 8192, (2,))


@given(text=st.text().filter(lambda text: "<end>" not in text))  # written out, a special token is that token
def test_byte_vocabulary_gives_every_text_back(text: str) -> None:
    vocabulary = byte_vocabulary()
    tokens = vocabulary.encode(text, add_special_tokens=True)
    assert tokens == tuple(text.encode())
    assert vocabulary.tokenizer.decode(list(tokens)) == text
    assert b"".join(vocabulary.token_bytes[token] for token in tokens).decode() == text


def test_byte_vocabulary_knows_its_end() -> None:
    vocabulary = byte_vocabulary()
    assert vocabulary.encode("a<end>", add_special_tokens=False) == (97, 256)
    assert (vocabulary.end_token_ids, vocabulary.size) == ((256,), 257)
