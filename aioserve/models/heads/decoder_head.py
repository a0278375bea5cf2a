"""Base of heads that are decoders with KV pages of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from aioserve.models.architecture import Architecture
from aioserve.models.block_parts import Weights
from aioserve.ops import (
    Batch,
    Drawn,
    Embedding,
    KVCache,
    KVShape,
    LayerOps,
    Linear,
    SampleRows,
    StepProgram,
    TensorOps,
)
from aioserve.ops.kv_cache import format_of_floats
from aioserve.paging.layout import KVLayout, kv_layout

__all__ = ["DecoderHead"]

X = TypeVar("X")


class DecoderHead(ABC):
    """Loaded head. Only one thread at a time may use it.

    It keeps no state between calls: KV of earlier tokens is in the pages that a batch names. In a
    batch, `token_ids` are one token ahead of `positions`. The row at position i has the target's
    features of token i and the id of token i + 1. Its logits are for token i + 2.

    - features: number of columns of the target's features.
    - use_program: run a call in one program, as in `Decoder`.
    """

    def __init__(
        self,
        config: Architecture,
        weights: Weights,
        embedding: Embedding,
        output: Linear,
        max_model_len: int,
        *,
        features: int,
        use_program: bool,
    ) -> None:
        self.dtype: torch.dtype = weights.dtype
        """Dtype of hidden states, and of the KV pages."""
        self.hidden_size: int = config.hidden_size
        self.max_model_len: int = max_model_len
        """Longest context, in tokens."""
        layers = config.kv_layers(format_of_floats(self.dtype))
        self.layout: KVLayout = kv_layout(layers, max_model_len, grouped=False)
        """Layout of the KV pages: one group of all layers."""
        self._backend = weights.backend
        self._embedding = embedding
        self._output = output
        self._rotary_tables = weights.rotary_tables
        self._features = features
        self._programs: dict[bool, StepProgram | None] = {False: None, True: None}
        """Programs that start from the target's features (True) or own hidden states (False)."""
        if use_program:
            shape = self.kv_shape(1, 1)
            for fuses in self._programs:
                forward = partial(self._compute, fuses=fuses)
                self._programs[fuses] = self._backend.record(forward, shape, self.dtype)

    def kv_shape(self, num_pages: int, page_size: int) -> KVShape:
        """Sizes of the head's KV cache of `num_pages` pages."""
        return KVShape(self.layout, num_pages, page_size)

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        return self._backend.allocate_kv(self.kv_shape(num_pages, page_size))

    @property
    @abstractmethod
    def kind(self) -> str:
        """Kind of head, by its name in `speculators`."""

    @torch.inference_mode()
    def forward(
        self, rows: Tensor, batch: Batch, kv: KVCache, *, fuses: bool
    ) -> tuple[Tensor, Tensor]:
        """Write the batch's keys and values into `kv`; return logits and hidden states.

        - rows: with `fuses`, features `[T, features * target_hidden_size]` of the target's layers,
          in the order of `layers_read`. Otherwise hidden states `[T, hidden]` of an earlier call.
          They are not modified.

        Both results are for the batch's S `logit_rows`. Logits are float32 `[S, vocab]` in the
        target's vocabulary, with -inf for tokens that the head can't draft. The next draft step
        reads the hidden states `[S, hidden]`. Raises ValueError for a context beyond
        `max_model_len`, and for rows of another shape or dtype.
        """
        program = self._programs[fuses]
        hidden = self._checked(rows, batch, fuses)
        if program is not None:
            return program.logits(batch, kv, hidden, rows), hidden
        ops = TensorOps(self._backend, batch, kv, hidden, rows)
        return self._compute(ops, fuses=fuses), hidden

    @torch.inference_mode()
    def draw(
        self,
        rows: Tensor,
        batch: Batch,
        kv: KVCache,
        samples: SampleRows,
        last_tokens: Tensor,
        *,
        fuses: bool,
    ) -> tuple[Drawn, Tensor]:
        """`forward`, then `Backend.draw` from its logits. Returns the hidden states, too."""
        program = self._programs[fuses]
        if program is None:
            logits, hidden = self.forward(rows, batch, kv, fuses=fuses)
            return self._backend.draw(logits, samples, last_tokens), hidden
        hidden = self._checked(rows, batch, fuses)
        return program.draw(batch, kv, samples, last_tokens, None, hidden, rows), hidden

    @abstractmethod
    def _fused(self, ops: LayerOps[X], features: X) -> X:
        """Make hidden states `[T, hidden]` of the target's features, which it may overwrite."""

    @abstractmethod
    def _behind(self, ops: LayerOps[X], hidden: X) -> X:
        """Compute the layers: `[T, hidden]` -> `[S, hidden]`. It may overwrite `hidden`."""

    @abstractmethod
    def _logits(self, ops: LayerOps[X], hidden: X) -> X:
        """Compute logits in the target's vocabulary from the result of `_behind`."""

    def _compute(self, ops: LayerOps[X], *, fuses: bool) -> X:
        if fuses:
            hidden = self._fused(ops, ops.hidden_in(self._features))
        else:
            hidden = ops.hidden_in(self.hidden_size)
        hidden = self._behind(ops, hidden)
        ops.tap(hidden, 0)
        return self._logits(ops, hidden)

    def _checked(self, rows: Tensor, batch: Batch, fuses: bool) -> Tensor:
        """Check arguments, extend the rotary tables, and allocate the batch's hidden states."""
        shape = len(batch.token_ids), self._features if fuses else self.hidden_size
        if rows.shape != shape or rows.dtype is not self.dtype or not rows.is_contiguous():
            strided = "" if rows.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"rows must be contiguous {self.dtype} of shape {list(shape)}, got {rows.dtype} "
                f"{list(rows.shape)}{strided}"
            )
        limit, end_position = self.max_model_len, batch.end_position
        if end_position > limit:
            raise ValueError(f"end_position must be at most {limit}, got {end_position}")
        for table in self._rotary_tables:
            table.cover(end_position)
        shape = len(batch.logit_rows), self.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self._backend.device)
