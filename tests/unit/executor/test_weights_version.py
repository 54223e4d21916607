"""Other weights have another name; the same ones keep theirs."""

import os
from pathlib import Path

from services.executor.weights_version import weights_version


def test_without_a_model_there_is_no_name() -> None:
    assert weights_version(None) == ""


def test_a_file_that_was_written_again_has_another_name(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    first = weights_version(file)
    assert first == weights_version(file)
    os.utime(file, ns=(1, 1))
    second = weights_version(file)
    file.write_bytes(b"other weights")
    os.utime(file, ns=(1, 1))
    assert len({first, second, weights_version(file)}) == 3


def test_any_file_of_a_directory_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = weights_version(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert first != weights_version(tmp_path)
