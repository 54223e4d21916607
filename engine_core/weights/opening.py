"""Opens whatever a model is stored as: a GGUF file, or the directory of a Hugging Face checkpoint."""

from pathlib import Path

from engine_core.weights.checkpoint import open_checkpoint
from engine_core.weights.gguf import GgufFile, open_gguf
from engine_core.weights.quantise import quantised


def open_model(path: Path, quantise: str | None = None) -> GgufFile:
    """Open the model, its float matrices in the format `quantise` if that is given. Raises ModelError's kinds."""
    file = open_checkpoint(path) if path.is_dir() else open_gguf(path)
    return file if quantise is None else quantised(file, quantise)
