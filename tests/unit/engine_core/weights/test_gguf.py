"""The GGUF reader against the format's own package, and against every kind of damaged file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.config import read_model_config
from engine_core.errors import ModelError, ModelFileError, UnsupportedModelError
from engine_core.weights.gguf import open_gguf

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]


@pytest.mark.parametrize("type_name", TYPES)
def test_tensors_equal_those_of_the_gguf_package(write_tiny_model, tiny_shape, type_name):
    weight_type = gguf.GGMLQuantizationType[type_name]
    path = write_tiny_model(tiny_shape(hidden=64, head_dim=16, inner=96, weight_type=weight_type))
    file = open_gguf(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert set(file.tensors) == set(theirs)
    for name, tensor in file.tensors.items():
        expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert tensor.shape == tuple(int(size) for size in theirs[name].shape[::-1])
        np.testing.assert_array_equal(tensor.dequantized(), expected.reshape(tensor.shape))


def test_metadata_and_arrays_equal_those_of_the_gguf_package(write_tiny_model):
    path = write_tiny_model(metadata={"test.integer": 7, "test.text": "ä", "test.number": 0.5})
    file = open_gguf(path)
    assert file.integer("test.integer") == 7
    assert file.text("test.text") == "ä"
    assert file.number("test.number") == 0.5
    assert file.integer("absent", 3) == 3
    assert file.array_values("tokenizer.ggml.tokens") == [f"token{index}" for index in range(97)]


def test_the_default_model_reads_like_with_the_gguf_package(model_path: Path):
    file = open_gguf(model_path)
    theirs = gguf.GGUFReader(model_path)
    for tensor in theirs.tensors:
        assert np.array_equal(file.tensors[tensor.name].data, tensor.data.reshape(-1).view(np.uint8))
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = file.metadata[key]
        assert (value if isinstance(value, int | float | str) else file.array_values(key)) == field.contents()


@pytest.mark.parametrize(
    ("ask", "key"),
    [("integer", "general.name"), ("number", "general.name"), ("text", "llama.block_count"), ("integer", "absent")],
)
def test_metadata_of_the_wrong_kind_is_a_file_error_naming_the_key(write_tiny_model, ask, key):
    file = open_gguf(write_tiny_model())
    with pytest.raises(ModelFileError, match=key):
        getattr(file, ask)(key)


def test_a_missing_tensor_is_a_file_error_naming_it(write_tiny_model):
    with pytest.raises(ModelFileError, match=r"blk\.9\.attn_q"):
        open_gguf(write_tiny_model()).tensor("blk.9.attn_q.weight")


def test_a_type_that_cannot_be_dequantised_is_unsupported(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    odd = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("odd.weight", np.zeros((1, 292), dtype=np.uint8), raw_dtype=odd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        open_gguf(path).tensor("odd.weight").dequantized()


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ModelFileError, match="no such model file"):
        open_gguf(tmp_path / "absent.gguf")


def test_a_folder_is_a_file_error(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_gguf(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", ModelFileError, "empty"),
        (b"GG", ModelFileError, "truncated"),
        (b"PK\x03\x04" + bytes(100), ModelFileError, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), UnsupportedModelError, "version 1"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(100), UnsupportedModelError, "version 99"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), UnsupportedModelError, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(100), ModelFileError, "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(100), ModelFileError, "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(100), ModelFileError, "truncated or corrupt"),
    ],
)
def test_a_file_that_is_no_whole_gguf_is_refused_with_a_reason(tmp_path, content, error, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        open_gguf(path)


def test_an_array_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "nested.gguf"
    array_of_one_array = struct.pack("<IQ", 9, 1)
    content = struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + array_of_one_array * 5000
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="nested too deeply"):
        open_gguf(path)


def test_a_file_cut_short_anywhere_is_refused(write_tiny_model, tmp_path):
    whole = write_tiny_model().read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 64, 61):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_gguf(cut)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupted_header_gives_a_model_error_or_a_readable_file(write_tiny_model, tmp_path, data):
    """Whatever the bytes: no other exception, no crash, no absurd allocation."""
    path = tmp_path / "tiny.gguf"
    content = bytearray((path if path.exists() else write_tiny_model()).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, min(len(content), 4200) - 8))
        content[offset : offset + 8] = data.draw(st.binary(min_size=8, max_size=8) | st.just(b"\xff" * 8))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        file = open_gguf(damaged)
        read_model_config(file)
        for tensor in file.tensors.values():
            tensor.dequantized()
    except ModelError:
        pass
