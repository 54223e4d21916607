"""The Llama architecture (Touvron et al., "LLaMA", 2023): pre-norm, RoPE, grouped-query attention, SwiGLU, no biases.

Owns the weights and the order of the computation, in any number type and on any device. Knows nothing of sampling or of
how blocks are assigned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine_core.attention import ATTENTION_KERNELS
from engine_core.attention.paged import Span
from engine_core.config import ModelConfig
from engine_core.kv_cache import KvPool
from engine_core.layers.feed_forward import swiglu
from engine_core.layers.normalization import rms_norm
from engine_core.layers.rotary import RotaryTable, rotate
from engine_core.layers.row_tiles import in_tiles, pad_rows, rows_agree
from engine_core.torch_options import TorchOptions
from engine_core.weights.named_tensors import NamedTensors


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """Weights of one layer, each matrix [out, in].

    qkv: query heads (scaled by head_dim^-0.5), key heads, value heads. gate_up: gates, then ups.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_output: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """embedding and head [vocab, hidden] (one tensor if tied), final_norm [hidden]."""

    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    head: Tensor
    rotary_factors: Tensor | None = None


class LlamaModel:
    """The network as functions of token rows; dense parts run in row tiles (see layers/row_tiles.py)."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, max_positions: int, options: TorchOptions) -> None:
        self.config = config
        self.weights = weights
        self.attention = ATTENTION_KERNELS[options.attention]
        self.rotary = RotaryTable(
            max_positions,
            config.head_dim,
            config.rope_theta,
            config.rope_scale,
            weights.rotary_factors,
            device=options.device,
        )
        self.tile_rows = options.tile_rows if self.places_in_a_tile_agree(options.tile_rows) else 1

    def hidden_states(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span], pool: KvPool) -> Tensor:
        """Run all layers over the spans' tokens and write their keys and values to the pool.

        tokens and positions int64 [n], one stretch per span
        → [n rounded up to whole tiles, hidden] before the final norm.
        """
        num_tokens = len(tokens)
        slots = torch.cat([span.own_slots for span in spans])
        head_counts = [self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads]
        hidden = pad_rows(self.weights.embedding[tokens], self.tile_rows)
        cos = pad_rows(self.rotary.cos[positions], self.tile_rows)
        sin = pad_rows(self.rotary.sin[positions], self.tile_rows)
        for index, layer in enumerate(self.weights.layers):
            qkv = in_tiles(partial(self.attention_input, layer), self.tile_rows, hidden, cos, sin)
            queries, keys, values = torch.split(qkv, head_counts, dim=1)
            pool.write(index, slots, keys[:num_tokens], values[:num_tokens])
            attended = self.attention(queries, pool.layer(index), spans)
            hidden = in_tiles(partial(self.layer_output, layer), self.tile_rows, hidden, attended)
        return hidden

    def attention_input(self, layer: LlamaLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden [n, hidden] → query, key and value heads [n, heads + 2 x kv_heads, head_dim], rotated."""
        normed = rms_norm(hidden, layer.attention_norm, self.config.rms_eps)
        heads = functional.linear(normed, layer.qkv).view(len(hidden), -1, self.config.head_dim)
        num_rotated = self.config.num_heads + self.config.num_kv_heads
        return torch.cat((rotate(heads[:, :num_rotated], cos, sin), heads[:, num_rotated:]), dim=1)

    def layer_output(self, layer: LlamaLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [n, hidden], attended [n, heads x head_dim] → the next layer's input [n, hidden]."""
        hidden = hidden + functional.linear(attended, layer.attention_output)
        normed = rms_norm(hidden, layer.feed_forward_norm, self.config.rms_eps)
        return hidden + functional.linear(swiglu(functional.linear(normed, layer.gate_up)), layer.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] of the rows that sample → float32 [n, vocab]."""
        return in_tiles(self.head, self.tile_rows, pad_rows(hidden, self.tile_rows))[: len(hidden)].float()

    def head(self, hidden: Tensor) -> Tensor:
        return functional.linear(self.final_norm(hidden), self.weights.head)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weights.final_norm, self.config.rms_eps)

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], whole tiles → as the head reads it, same shape."""
        return in_tiles(self.final_norm, self.tile_rows, hidden)

    def places_in_a_tile_agree(self, tile_rows: int) -> bool:
        """Whether this machine computes a row to the same bits at every place of a tile."""
        layer = self.weights.layers[0]  # one layer stands for all: they have the same shapes
        hidden = torch.linspace(-1.0, 1.0, self.config.hidden_size).to(self.weights.embedding)[None]
        attended = torch.linspace(-1.0, 1.0, self.config.q_size).to(self.weights.embedding)[None]
        cos, sin = self.rotary.cos[-1:], self.rotary.sin[-1:]
        return (
            rows_agree(partial(self.attention_input, layer), hidden, cos, sin, tile_rows=tile_rows)
            and rows_agree(partial(self.layer_output, layer), hidden, attended, tile_rows=tile_rows)
            and rows_agree(self.head, hidden, tile_rows=tile_rows)
        )


def load_llama(config: ModelConfig, tensors: NamedTensors, max_positions: int, options: TorchOptions) -> LlamaModel:
    """Take all weights from the file.

    Raises ModelFileError for missing tensors or wrong shapes, UnsupportedModelError for foreign tensors.
    """
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = tensors.take("token_embd.weight", vocab_shape)
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(load_layer(config, tensors, index) for index in range(config.num_layers)),
        final_norm=tensors.take("output_norm.weight", (config.hidden_size,)),
        head=embedding if config.tied_embeddings else tensors.take("output.weight", vocab_shape),
        rotary_factors=tensors.take_if_present("rope_freqs.weight", (config.head_dim // 2,)),
    )
    tensors.refuse_leftovers()
    return LlamaModel(config, weights, max_positions, options)


def load_layer(config: ModelConfig, tensors: NamedTensors, index: int) -> LlamaLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"blk.{index}."

    def take(name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return tensors.take(f"{prefix}{name}.weight", shape, scale)

    queries = take("attn_q", config.q_size, hidden, scale=config.head_dim**-0.5)
    keys = take("attn_k", config.kv_size, hidden)
    values = take("attn_v", config.kv_size, hidden)
    return LlamaLayer(
        attention_norm=take("attn_norm", hidden),
        qkv=torch.cat((queries, keys, values)),
        attention_output=take("attn_output", hidden, config.q_size),
        feed_forward_norm=take("ffn_norm", hidden),
        gate_up=torch.cat((take("ffn_gate", inner, hidden), take("ffn_up", inner, hidden))),
        down=take("ffn_down", hidden, inner),
    )
