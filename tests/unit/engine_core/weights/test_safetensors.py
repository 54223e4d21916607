"""The safetensors format: what the library writes is read, and damage is found before it is used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine_core.errors import ModelFileError
from engine_core.weights.safetensors import open_safetensors


def write(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.full((5,), 1.5, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m.safetensors")
    read = open_safetensors(tmp_path / "m.safetensors")
    assert {name: (t.type, t.shape) for name, t in read.items()} == {
        "a": ("F32", (3, 4)), "b": ("BF16", (5,)), "c": ("I64", ()),
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert read[name].data.tobytes() == tensor.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\xff" * 20, "ends inside its header"),
        ((4).to_bytes(8, "little") + b"nope", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        open_safetensors(path)
    with pytest.raises(ModelFileError, match="no such model file"):
        open_safetensors(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": 1, "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelFileError, match="tensor a"):
        open_safetensors(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_reads_beyond_the_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.safetensors"
    write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        tensors = open_safetensors(path)
    except ModelFileError:
        return
    for tensor in tensors.values():
        assert tensor.data.nbytes <= len(content)
        np.asarray(tensor.data).sum()
