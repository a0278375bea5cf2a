"""EAGLE-3 head over its own KV pages (Li et al., "EAGLE-3: Scaling up inference acceleration of
large language models via training-time test", 2025, section 3.1).

    hidden states f1, f2, f3 of token i, which the target computed        token i + 1
                  │ fuse                                                      │ embed
                  ▼                                                           ▼
               hidden ──► norm ──► side by side with the norm of the embedding ──► attention, MLP
                  ▲                                                                     │
                  └───────── for tokens that the target has not computed ◄── hidden ◄───┤
                                                                    logits of i + 2 ◄───┘
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.block_parts import Norm, Weights, rms_norm
from aioserve.models.blocks import DecoderLayer, ResidualStream
from aioserve.models.feed_forward import make_feed_forward
from aioserve.models.heads.config import Eagle3Config
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.mixers import make_mixer
from aioserve.ops import Embedding, LayerOps, Linear

__all__ = ["Eagle3Head"]

X = TypeVar("X")


class Eagle3Head(DecoderHead):
    """Loaded EAGLE-3 head.

    - embedding: `[vocab, hidden]`, its own or the target's.
    - output: `[draft vocab, hidden]`, with float32 results.
    - draft_ids: int64 `[draft vocab]`, the target's id of each of the head's tokens; None: both
      have the same ids.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        draft_ids: npt.NDArray[np.int64] | None,
        max_model_len: int,
        *,
        use_program: bool = True,
    ) -> None:
        self.config: Eagle3Config = config
        self._feature_norms = tuple(rms_norm(norm, weights) for norm in config.feature_norms)
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
        self._draft_ids: Tensor | None = None
        if draft_ids is not None:
            self._draft_ids = weights.backend.place(torch.from_numpy(draft_ids))
        features = config.num_features * config.target_hidden_size
        shared = embedding, output, max_model_len
        super().__init__(config, weights, *shared, features=features, use_program=use_program)

    @property
    def kind(self) -> str:
        return self.config.kind

    def _fused(self, ops: LayerOps[X], features: X) -> X:
        first = 0
        for norm in self._feature_norms:
            ops.norm_columns(features, norm, first)
            first += len(norm.weight)
        return ops.linear(features, self._fusion)

    def _behind(self, ops: LayerOps[X], hidden: X) -> X:
        embedded = self._embedding_norm(ops, ops.embed(self._embedding))
        normed = self._hidden_norm(ops, hidden)
        stream = ResidualStream(ops, normed if self.config.norms_residual else hidden)
        is_last = not self._layers
        x = ops.concat(embedded, normed)
        mixed = self._mixer(ops, x, logit_rows_only=is_last)
        if is_last:
            stream.keep_logit_rows()
        stream.add(mixed)
        x = stream.normed(self._feed_forward_norm)
        stream.add(self._feed_forward(ops, x))
        for layer in self._layers:
            layer(stream, logit_rows_only=layer is self._layers[-1])
        return stream.normed(self._final_norm if self.config.norms_output else None)

    def _logits(self, ops: LayerOps[X], hidden: X) -> X:
        if not self.config.norms_output:
            hidden = self._final_norm(ops, hidden)
        logits = ops.linear(hidden, self._output)
        if self._draft_ids is None:
            return logits
        return ops.scatter_columns(logits, self._draft_ids, self.config.vocab_size)


def _needed(described: architecture.Norm | None, weights: Weights) -> Norm:
    if described is None:
        raise TypeError("the first layer of a head has norms before its blocks")
    return Norm(described, weights)
