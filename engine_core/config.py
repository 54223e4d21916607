"""What a model is: the hyperparameters read from its file. Knows no tensors and no engine."""

from dataclasses import dataclass

from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.weights.gguf import REMEDY, GgufFile

MAX_DIMENSION = 1 << 24
"""Far above any real model: a larger number in a file means a corrupt file."""
SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
)
FACTORS = ("rms_eps", "rope_theta", "rope_scale")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters of a decoder-only transformer.

    `rope_scale` divides positions (1.0: none). `tied_embeddings`: the LM head is the embedding matrix.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scale: float
    tied_embeddings: bool

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that the KV pool holds for one token: keys and values of all layers."""
        return 2 * self.num_layers * self.kv_size


def read_model_config(file: GgufFile) -> ModelConfig:
    """Hyperparameters of a GGUF file of any llama-shaped architecture.

    Raises ModelFileError for missing or impossible values, UnsupportedModelError for features that no engine
    here runs.
    """
    architecture = file.text("general.architecture")
    refuse_unsupported(file, architecture)
    rope_is_scaled = file.metadata.get(f"{architecture}.rope.scaling.type") == "linear"
    num_heads = file.integer(f"{architecture}.attention.head_count")
    hidden_size = file.integer(f"{architecture}.embedding_length")
    config = ModelConfig(
        architecture=architecture,
        name=file.text("general.name", file.path.stem),
        num_layers=file.integer(f"{architecture}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=file.integer(f"{architecture}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=file.integer(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1)),
        vocab_size=file.tensor("token_embd.weight").shape[0],
        context_length=file.integer(f"{architecture}.context_length"),
        rms_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{architecture}.rope.freq_base", 10000.0),
        rope_scale=file.number(f"{architecture}.rope.scaling.factor", 1.0) if rope_is_scaled else 1.0,
        tied_embeddings="output.weight" not in file.tensors,
    )
    check_plausible(file, config)
    return config


def refuse_unsupported(file: GgufFile, architecture: str) -> None:
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModelError(f"{file.path}: the model is split over several files; merge them into one")
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(f"{file.path}: RoPE scaling {scaling!r} is not supported; use none or linear")
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported; use a dense model")


def check_plausible(file: GgufFile, config: ModelConfig) -> None:
    """Refuse numbers that no model has, before anything is allocated by them."""
    if config.num_layers > len(file.tensors):
        raise ModelFileError(f"{file.path}: {config.num_layers} layers, {len(file.tensors)} tensors; {REMEDY}")
    for size in SIZES:
        if not 1 <= getattr(config, size) <= MAX_DIMENSION:
            raise ModelFileError(f"{file.path}: {size} is {getattr(config, size)}; {REMEDY}")
    if config.num_heads % config.num_kv_heads:
        heads = f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads"
        raise ModelFileError(f"{file.path}: {heads}; {REMEDY}")
    if config.head_dim % 2:
        raise ModelFileError(f"{file.path}: the head dimension {config.head_dim} is odd; {REMEDY}")
    if file.integer(f"{config.architecture}.rope.dimension_count", config.head_dim) != config.head_dim:
        raise UnsupportedModelError(f"{file.path}: RoPE over a part of the head is not supported; use another model")
    for name in FACTORS:
        if getattr(config, name) <= 0:
            raise ModelFileError(f"{file.path}: {name} is {getattr(config, name)}, not positive; {REMEDY}")
