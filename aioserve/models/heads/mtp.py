"""Computes a head for multi-token prediction over its own KV pages (DeepSeek-AI, "DeepSeek-V3
technical report", 2024, section 2.2), one layer that reads its own output for further guesses (Cai
et al., "FastMTP", 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from aioserve.models.block_parts import Norm, Weights
from aioserve.models.blocks import DecoderLayer, ResidualStream
from aioserve.models.heads.config import MTPConfig
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.ops import Batch, Embedding, KVCache, Linear

__all__ = ["MTPHead"]


class MTPHead(DecoderHead):
    """A loaded head.

    embedding, output: the target's.
    """

    def __init__(
        self,
        config: MTPConfig,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        max_model_len: int,
    ) -> None:
        self.config: MTPConfig = config
        self._token_norm = Norm(config.token_norm, weights)
        self._hidden_norm = Norm(config.hidden_norm, weights)
        self._projection = weights.linear(config.projection)
        self._layer = DecoderLayer(config.layers[0], 0, weights)
        self._final_norm = Norm(config.final_norm, weights)
        super().__init__(config, weights, embedding, output, max_model_len)

    @property
    def kind(self) -> str:
        return self.config.kind

    def fuse(self, features: Tensor) -> Tensor:
        self._check("features", features, len(features), self.hidden_size)
        return features

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """As `DecoderHead.forward`; `hidden` is what the target's last layer gave, or of an earlier
        call."""
        ops = self._ops(hidden, batch, kv)
        embedded = self._token_norm(ops, ops.embed(self._embedding))
        both = torch.cat([embedded, self._hidden_norm(ops, hidden)], dim=1)
        stream = ResidualStream(ops, ops.linear(both, self._projection))
        self._layer(stream, logit_rows_only=True)
        return stream.normed(self._final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._output(hidden)
