"""What heads have in common that are a decoder of their own, with KV pages of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aioserve.kv.layout import KVLayout, kv_layout
from aioserve.models.architecture import Architecture
from aioserve.models.block_parts import Weights
from aioserve.ops import Batch, Embedding, KVCache, KVShape, Linear, TensorOps

__all__ = ["DecoderHead"]


class DecoderHead(ABC):
    """A loaded head. Computes for one thread at a time, op by op, and keeps nothing between calls:
    what a sequence has left behind is in the KV pages that calls name.

    In a batch of the head's, `token_ids` are one token ahead of `positions`: the row at position i
    has what the target knew at token i, and token i + 1. Its logits are of token i + 2.
    """

    def __init__(
        self,
        config: Architecture,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        max_model_len: int,
    ) -> None:
        self.dtype: torch.dtype = weights.dtype
        """Dtype of hidden states, and of the KV pages."""
        self.hidden_size: int = config.hidden_size
        self.max_model_len: int = max_model_len
        """Longest context in tokens."""
        layers = config.kv_layers(self.dtype.itemsize)
        self.layout: KVLayout = kv_layout(layers, max_model_len, grouped=False)
        """Layers share every KV page."""
        self._heads = config.heads
        self._backend = weights.backend
        self._embedding = embedding
        self._output = output
        self._rotary_tables = weights.rotary_tables

    def kv_shape(self, num_pages: int, page_size: int) -> KVShape:
        """Sizes of KV pages for the head's layers."""
        heads = self._heads
        return KVShape(self.layout, num_pages, page_size, heads.kv, heads.dim, self.dtype)

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        return self._backend.allocate_kv(self.kv_shape(num_pages, page_size))

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of head, as `speculators` names it."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` of what the target's layers had, `[T, features *
        target_hidden_size]` in the order of `layers_read`.

        Raises ValueError for features of another shape or dtype.
        """

    @abstractmethod
    def forward(self, hidden: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv`; return hidden states `[S, hidden]` of its
        `logit_rows`: `logits` makes guesses of them, and the next guess reads them.

        hidden: `[T, hidden]`. It doesn't change.
        Raises ValueError for a context beyond `max_model_len`, and for hidden states of another
        shape or dtype.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the head's tokens, float32 `[S, draft vocab]`, of what `forward` returned."""

    def target_logits(self, hidden: Tensor) -> Tensor:
        """`logits` of the target's tokens, float32 `[S, vocab]`: -inf for those that the head
        doesn't know."""
        return self.logits(hidden)

    def _ops(self, hidden: Tensor, batch: Batch, kv: KVCache) -> TensorOps:
        """Ops of a batch that fits."""
        self._check("hidden", hidden, len(batch.token_ids), self.hidden_size)
        if batch.max_context > self.max_model_len:
            raise ValueError(
                f"max_context must be at most {self.max_model_len}, got {batch.max_context}"
            )
        for table in self._rotary_tables:
            table.cover(batch.max_context)
        return TensorOps(self._backend, batch, kv)

    def _check(self, name: str, x: Tensor, rows: int, columns: int) -> None:
        shape = (rows, columns)
        if x.shape != shape or x.dtype is not self.dtype:
            raise ValueError(
                f"{name} must be {self.dtype} of shape {list(shape)}, got {x.dtype} {list(x.shape)}"
            )
