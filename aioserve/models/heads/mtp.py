"""Head for multi-token prediction over its own KV pages (DeepSeek-AI, "DeepSeek-V3 technical
report", 2024, section 2.2).

Its one layer reads its own output to draft further tokens (Cai et al., "FastMTP", 2025)."""

from __future__ import annotations

from typing import TypeVar

from aioserve.models.block_parts import Norm, Weights
from aioserve.models.blocks import DecoderLayer, ResidualStream
from aioserve.models.heads.config import MTPConfig
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.ops import Embedding, LayerOps, Linear

__all__ = ["MTPHead"]

X = TypeVar("X")


class MTPHead(DecoderHead):
    """Loaded head for multi-token prediction. `embedding` and `output` are the target's."""

    def __init__(
        self,
        config: MTPConfig,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        max_model_len: int,
        *,
        use_program: bool = True,
    ) -> None:
        self.config: MTPConfig = config
        self._token_norm = Norm(config.token_norm, weights)
        self._hidden_norm = Norm(config.hidden_norm, weights)
        self._projection = weights.linear(config.projection)
        self._layer = DecoderLayer(config.layers[0], 0, weights)
        self._final_norm = Norm(config.final_norm, weights)
        shared = embedding, output, max_model_len
        features = config.hidden_size
        super().__init__(config, weights, *shared, features=features, use_program=use_program)

    @property
    def kind(self) -> str:
        return self.config.kind

    def _fused(self, ops: LayerOps[X], features: X) -> X:
        """Return the output of the target's last layer, unchanged."""
        return features

    def _behind(self, ops: LayerOps[X], hidden: X) -> X:
        embedded = self._token_norm(ops, ops.embed(self._embedding))
        both = ops.concat(embedded, self._hidden_norm(ops, hidden))
        stream = ResidualStream(ops, ops.linear(both, self._projection))
        self._layer(stream, logit_rows_only=True)
        return stream.normed(self._final_norm)

    def _logits(self, ops: LayerOps[X], hidden: X) -> X:
        return ops.linear(hidden, self._output)
