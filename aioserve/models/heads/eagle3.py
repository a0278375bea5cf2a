"""Computes an EAGLE-3 head over its own KV pages (Li et al., "EAGLE-3: Scaling up inference
acceleration of large language models via training-time test", 2025, section 3.1).

    hidden states f1, f2, f3 of token i, which the target computed        token i + 1
                  │ fuse                                                      │ embed
                  ▼                                                           ▼
               hidden ──► norm ──► side by side with the norm of the embedding ──► attention, MLP
                  ▲                                                                     │
                  └───────── where the target has computed none yet ◄── hidden ◄────────┤
                                                                    logits of i + 2 ◄───┘
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.block_parts import Norm, Weights
from aioserve.models.blocks import DecoderLayer, ResidualStream
from aioserve.models.feed_forward import make_feed_forward
from aioserve.models.heads.config import Eagle3Config
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.mixers import make_mixer
from aioserve.ops import Batch, Embedding, KVCache, Linear

__all__ = ["Eagle3Head"]


class Eagle3Head(DecoderHead):
    """A loaded head.

    embedding: `[vocab, hidden]`, its own or the target's.
    output: `[draft vocab, hidden]`, float32 results.
    draft_ids: int64 `[draft vocab]`, the target's tokens; None: all are alike.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        draft_ids: npt.NDArray[np.int64] | None,
        max_model_len: int,
    ) -> None:
        self.config: Eagle3Config = config
        self._feature_norms = tuple(Norm(norm, weights) for norm in config.feature_norms)
        self._fusion = weights.linear(config.fusion)
        first = config.layers[0]
        self._embedding_norm = _needed(first.mixer_norm, weights)
        self._hidden_norm = Norm(config.hidden_norm, weights)
        self._mixer = make_mixer(first.mixer, 0, weights)
        self._feed_forward_norm = _needed(first.feed_forward_norm, weights)
        self._feed_forward = make_feed_forward(first.feed_forward, weights)
        others = enumerate(config.layers[1:], start=1)
        self._layers = tuple(DecoderLayer(layer, i, weights) for i, layer in others)
        self._final_norm = Norm(config.final_norm, weights)
        super().__init__(config, weights, embedding, output, max_model_len)
        self._draft_ids: Tensor | None = None
        if draft_ids is not None:
            self._draft_ids = self._backend.place(torch.from_numpy(draft_ids))

    @property
    def kind(self) -> str:
        return self.config.kind

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        config = self.config
        columns = config.num_features * config.target_hidden_size
        self._check("features", features, len(features), columns)
        norms = self._feature_norms
        if norms:
            parts = features.chunk(len(norms), dim=1)
            normed = [
                norm(self._backend, part.contiguous())
                for norm, part in zip(norms, parts, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return self._fusion(features)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """As `DecoderHead.forward`; `hidden` is of `fuse`, or of an earlier call."""
        ops = self._ops(hidden, batch, kv)
        embedded = self._embedding_norm(ops, ops.embed(self._embedding))
        normed = self._hidden_norm(ops, hidden)
        residual = normed if self.config.norms_residual else hidden
        stream = ResidualStream(ops, residual.clone())
        is_last = not self._layers
        x = torch.cat([embedded, normed], dim=1)
        mixed = self._mixer(ops, x, logit_rows_only=is_last)
        if is_last:
            stream.keep_logit_rows()
        stream.add(mixed)
        x = stream.normed(self._feed_forward_norm)
        stream.add(self._feed_forward(ops, x))
        for layer in self._layers:
            layer(stream, logit_rows_only=layer is self._layers[-1])
        return stream.normed(self._final_norm if self.config.norms_output else None)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the head's tokens, float32 `[S, draft vocab]`, of what `forward` returned."""
        if not self.config.norms_output:
            hidden = self._final_norm(self._backend, hidden)
        return self._output(hidden)

    @torch.inference_mode()
    def target_logits(self, hidden: Tensor) -> Tensor:
        logits = self.logits(hidden)
        if self._draft_ids is None:
            return logits
        shape = len(logits), self.config.vocab_size
        found = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        found[:, self._draft_ids] = logits
        return found


def _needed(described: architecture.Norm | None, weights: Weights) -> Norm:
    if described is None:
        raise TypeError("the first layer of a head has norms before its blocks")
    return Norm(described, weights)
