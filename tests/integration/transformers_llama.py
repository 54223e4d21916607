"""The model of a GGUF file as Hugging Face transformers runs it, float32.

The weights are read with the gguf package and put into its layout here, so that nothing of our reading, dequantising or
rotary layout is shared.
"""

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def in_halves_layout(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), … to halves: first members, then second members."""
    out_features, in_features = weight.shape
    pairs = weight.view(num_heads, out_features // num_heads // 2, 2, in_features)
    return pairs.transpose(1, 2).reshape(out_features, in_features)


def transformers_name(name: str) -> str:
    """GGUF tensor name → transformers parameter name."""
    parts = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    *block, part, weight = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{parts[part]}.{weight}"


def transformers_llama(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    """Return the model in a file."""
    field = {key: value.contents() for key, value in reader.fields.items() if key.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=field["llama.rope.freq_base"],
        tie_word_embeddings=True,
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            heads = config.num_attention_heads if "attn_q." in tensor.name else config.num_key_value_heads
            values = in_halves_layout(values, heads)
        weights[transformers_name(tensor.name)] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(weights)  # strict: no parameter is left at its random start
    return model
