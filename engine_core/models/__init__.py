"""models: one file per architecture, and the table of them. A model owns its weights and their order."""

from collections.abc import Callable

from engine_core.config import ModelConfig, read_model_config
from engine_core.errors import UnsupportedModelError
from engine_core.models.llama import LlamaModel, load_llama
from engine_core.torch_options import TorchOptions
from engine_core.weights.gguf import GgufFile
from engine_core.weights.named_tensors import NamedTensors

MODELS: dict[str, Callable[[ModelConfig, NamedTensors, int, TorchOptions], LlamaModel]] = {
    "llama": load_llama,
}
"""Architecture name of a GGUF file → loader (config, tensors, longest sequence, options)."""


def read_supported_config(file: GgufFile) -> ModelConfig:
    """The file's hyperparameters. Raises UnsupportedModelError for an architecture that is not in MODELS."""
    architecture = file.text("general.architecture")
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported; use a model of one of: {', '.join(MODELS)}"
        )
    return read_model_config(file)
