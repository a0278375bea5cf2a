"""A decoder-only transformer over `aioserve.ops`, driven by its `DecoderConfig`.

Knows weights and one batch of tokens with their places in the KV pages. Knows nothing about
requests, schedules or who owns a page. Plain objects and loops, since the Python of a step runs
once per layer and token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from aioserve.models.batch import ForwardBatch
from aioserve.models.config import DecoderConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import KVCache, OpSet
from aioserve.ops.linear import PackedLinear
from aioserve.ops.types import AttentionBatch

__all__ = ["Decoder", "DecoderLayer", "DecoderWeights", "Norm"]


@dataclass(slots=True, frozen=True)
class Norm:
    """weight [H]; bias [H] of a LayerNorm, None for an RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """Weights of one layer. N = (num_heads + 2 * num_kv_heads) * head_dim."""

    attention_norm: Norm
    qkv: PackedLinear
    """[N, hidden]: queries, keys, values."""
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    attention_post_norm: Norm | None
    mlp_norm: Norm
    up: PackedLinear
    """gate and up, [2 * intermediate, hidden]; [intermediate, hidden] without a gate."""
    down: PackedLinear
    mlp_post_norm: Norm | None


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Token ids int64 [T] -> rows of the embedding [T, hidden], in memory of their own."""
    dtype: torch.dtype
    positions: torch.Tensor | None
    """[max_position_embeddings, hidden] where positions are learned."""
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: PackedLinear
    """[vocab, hidden], float32 results."""


class Decoder:
    """A loaded model. `forward` is called from one thread at a time.

    `max_model_len`: the longest context in tokens that it will be given.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, ops: OpSet, max_model_len: int
    ) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.ops = ops
        self.max_model_len = max_model_len
        self._weights = weights
        self._tables = tuple(RotaryTable(rope, max_model_len) for rope in config.ropes)
        self._normalize, self._add_normalize = _norm_functions(config, ops)
        self._activate = _activation(config, ops)
        # transformers rounds the scale to the model's dtype before it multiplies.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        """KV pages for this model, in its dtype."""
        config = self.config
        return KVCache.allocate(
            config.num_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Write the batch's keys and values into `kv`; return logits, float32 [S, vocab].

        Raises ValueError for a context beyond `max_model_len`.
        """
        attention, rows = batch.attention, batch.sample_rows
        residual = self._embed(batch.token_ids, attention)
        layers = self._weights.layers
        normalized = self._normalize(residual, layers[0].attention_norm)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            attended = self._attend(index, layer, normalized, attention, kv)
            if index == last:
                # Every key and value is written: from here on only the sampled rows matter.
                if rows.shape[0] == 0:
                    return torch.empty((0, self.config.vocab_size), dtype=torch.float32)
                attended, residual = attended[rows], residual[rows]
            out = layer.output(attended)
            if layer.attention_post_norm is not None:
                out = self._normalize(out, layer.attention_post_norm)
            normalized = self._add_normalize(out, residual, layer.mlp_norm)
            out = layer.down(self._activate(layer.up(normalized)))
            if layer.mlp_post_norm is not None:
                out = self._normalize(out, layer.mlp_post_norm)
            following = (
                self._weights.final_norm if index == last else layers[index + 1].attention_norm
            )
            normalized = self._add_normalize(out, residual, following)
        logits = self._weights.head(normalized)
        cap = self.config.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _embed(self, token_ids: torch.Tensor, attention: AttentionBatch) -> torch.Tensor:
        hidden = self._weights.embed(token_ids)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        if self._weights.positions is not None:
            if attention.max_context > self.max_model_len:
                raise ValueError(
                    f"max_context must be at most {self.max_model_len}, got {attention.max_context}"
                )
            hidden.add_(functional.embedding(attention.positions, self._weights.positions))
        for table in self._tables:
            table.cover(attention.max_context)
        return hidden

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        normalized: torch.Tensor,
        attention: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """normalized [T, hidden] -> [T, num_heads * head_dim], keys and values written."""
        config, ops = self.config, self.ops
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(normalized).view(-1, heads + 2 * kv_heads, config.head_dim)
        # Not `split`, whose Python takes longer than all of its work.
        queries, keys, values = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
        k_pages, v_pages = kv.layers[index]
        table = self._tables[config.layer_ropes[index]] if self._tables else None
        ops.rotary_kv_write(
            queries,
            keys,
            values,
            None if table is None else table.cos,
            None if table is None else table.sin,
            attention,
            k_pages,
            v_pages,
            q_norm=layer.query_norm,
            k_norm=layer.key_norm,
            eps=config.norm_eps,
            weight_offset=config.norm_weight_offset,
        )
        attended = ops.paged_attention(
            queries,
            k_pages,
            v_pages,
            attention,
            scale=config.attention_scale,
            window=config.windows[index],
            soft_cap=config.attention_soft_cap,
        )
        return attended.view(-1, heads * config.head_dim)


_Normalize = Callable[[torch.Tensor, Norm], torch.Tensor]
_AddNormalize = Callable[[torch.Tensor, torch.Tensor, Norm], torch.Tensor]


def _norm_functions(config: DecoderConfig, ops: OpSet) -> tuple[_Normalize, _AddNormalize]:
    """norm(x), and residual += x followed by norm(residual)."""
    eps, offset = config.norm_eps, config.norm_weight_offset
    rms_norm, add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def rms(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, eps, weight_offset=offset)

    def add_rms(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return add_rms_norm(x, residual, norm.weight, eps, weight_offset=offset)

    def layer(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)

    def add_layer(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return layer(residual.add_(x), norm)

    return (rms, add_rms) if config.norm == "rms" else (layer, add_layer)


def _activation(config: DecoderConfig, ops: OpSet) -> Callable[[torch.Tensor], torch.Tensor]:
    if config.gated_mlp:
        return ops.silu_mul if config.activation == "silu" else ops.gelu_tanh_mul
    return _gelu_tanh


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")
