"""Hyperparameters: read as written, refused when no engine here could run them."""

import pytest

from engine_core.config import read_model_config
from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.models import read_supported_config
from engine_core.weights.gguf import open_gguf


def test_hyperparameters_are_those_in_the_file(write_tiny_model, tiny_shape):
    config = read_model_config(open_gguf(write_tiny_model(tiny_shape(tied=False))))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 20, 28)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 6)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (97, 128, 1000.0)
    assert (config.name, config.tied_embeddings, config.kv_floats_per_token) == ("tiny", False, 48)


def test_the_default_model_is_understood(model_path):
    config = read_supported_config(open_gguf(model_path))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.context_length, config.tied_embeddings) == (49152, 8192, True)


def test_another_architecture_is_refused_with_the_supported_ones(write_tiny_model):
    with pytest.raises(UnsupportedModelError, match=r"'rwkv6'.*llama"):
        read_supported_config(open_gguf(write_tiny_model(architecture="rwkv6")))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"split.count": 3}, UnsupportedModelError, "several files"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "yarn"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 4}, UnsupportedModelError, "part of the head"),
        ({"llama.attention.head_count_kv": 3}, ModelFileError, "cannot share"),
        ({"llama.attention.head_count_kv": 0}, ModelFileError, "num_kv_heads is 0"),
        ({"llama.attention.head_count": 0}, ModelFileError, "num_heads is 0"),
        ({"llama.attention.key_length": 5}, ModelFileError, "odd"),
        ({"llama.block_count": 4_000_000_000}, ModelFileError, "layers"),
        ({"llama.feed_forward_length": 4_000_000_000}, ModelFileError, "intermediate_size"),
        ({"llama.context_length": "long"}, ModelFileError, "not an integer"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, ModelFileError, "rms_eps"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ModelFileError, "not a number"),
        ({"llama.rope.freq_base": -1.0}, ModelFileError, "rope_theta"),
    ],
)
def test_impossible_or_unsupported_values_are_refused(write_tiny_model, metadata, error, message):
    with pytest.raises(error, match=message):
        read_model_config(open_gguf(write_tiny_model(metadata=metadata)))


def test_linear_rope_scaling_is_read(write_tiny_model):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert read_model_config(open_gguf(write_tiny_model(metadata=scaling))).rope_scale == 4.0
