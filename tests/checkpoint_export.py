"""Writes a GGUF model as a Hugging Face checkpoint: weights as floats, vocabulary and template as JSON.

Nothing of our reading is used: the gguf, safetensors and tokenizers packages do the work, so that both ways of loading
a model can be compared.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
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


def export_checkpoint(gguf_path: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write config.json and two shards; and tokenizer.json with its companions, where the file has merges."""
    reader = gguf.GGUFReader(gguf_path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    directory.mkdir(exist_ok=True)
    write_config(fields, {tensor.name: tensor for tensor in reader.tensors}, directory)
    write_weights(reader, fields, directory, dtype)
    if "tokenizer.ggml.merges" in fields:
        write_tokenizer(fields, directory)
    return directory


def write_config(fields: dict[str, Any], tensors: dict[str, Any], directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    if "llama.attention.key_length" in fields:
        config["head_dim"] = fields["llama.attention.key_length"]
    (directory / "config.json").write_text(json.dumps(config))


def write_weights(reader: gguf.GGUFReader, fields: dict[str, Any], directory: Path, dtype: torch.dtype) -> None:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, tensor in enumerate(reader.tensors):
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        *block, part, _ = tensor.name.split(".")
        if part in heads:  # from pairs to halves
            pairs = values.view(heads[part], len(values) // heads[part] // 2, 2, -1)
            values = pairs.transpose(1, 2).reshape(values.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        shards[number % 2][f"{prefix}{NAMES[part]}.weight"] = values.to(dtype).contiguous()
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """As the model's authors publish it: digits apart, then GPT-2's byte-level BPE."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    options = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": {"content": tokens[fields["tokenizer.ggml.eos_token_id"]]},
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
