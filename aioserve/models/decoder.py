"""A decoder-only transformer over a `Backend`, as its `DecoderConfig` describes it.

Knows weights and one batch of tokens with their places in the KV pages. Knows nothing about
devices, requests, schedules or who owns a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aioserve.models.blocks import DecoderLayer, Norm
from aioserve.models.config import DecoderConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, Batch, KVCache, Linear

__all__ = ["Decoder", "DecoderWeights"]


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]
    """Token ids int64 [T] -> rows of the embedding [T, hidden], in memory of their own."""
    positions: Tensor | None
    """[max_position_embeddings, hidden] where positions are learned."""
    rotary_tables: tuple[RotaryTable, ...]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: Linear
    """[vocab, hidden], float32 results."""


class Decoder:
    """A loaded model. `forward` is called from one thread at a time.

    `max_model_len`: the longest context in tokens that it will be given.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, backend: Backend, max_model_len: int
    ) -> None:
        self.config = config
        self.dtype: torch.dtype = weights.dtype
        self.backend = backend
        self.max_model_len = max_model_len
        self._weights = weights
        # transformers rounds the scale to the model's dtype before it multiplies.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        """KV pages for this model, in its dtype."""
        config = self.config
        return self.backend.allocate_kv(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv`; return logits, float32 [S, vocab].

        Raises ValueError for a context beyond `max_model_len`.
        """
        residual = self._embed(batch)
        layers = self._weights.layers
        x = layers[0].attention_norm(residual)
        for index, layer in enumerate(layers):
            if index + 1 < len(layers):
                following = layers[index + 1].attention_norm
                x = layer.attention(x, batch, kv)
            else:
                # Every key and value is written: from here on only the sampled rows matter.
                following = self._weights.final_norm
                x = layer.attention(x, batch, kv, batch.logit_rows)
                residual = residual[batch.logit_rows]
            if layer.attention_post_norm is not None:
                x = layer.attention_post_norm(x)
            x = layer.mlp(layer.mlp_norm.add(x, residual))
            if layer.mlp_post_norm is not None:
                x = layer.mlp_post_norm(x)
            x = following.add(x, residual)
        logits = self._weights.head(x)
        cap = self.config.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _embed(self, batch: Batch) -> Tensor:
        if batch.max_context > self.max_model_len:
            raise ValueError(
                f"max_context must be at most {self.max_model_len}, got {batch.max_context}"
            )
        hidden = self._weights.embed(batch.token_ids)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        if self._weights.positions is not None:
            hidden.add_(self.backend.embedding(batch.positions, self._weights.positions))
        for table in self._weights.rotary_tables:
            table.cover(batch.max_context)
        return hidden
