"""Decoder-only transformer, made from its `DecoderConfig` and computed by a `Backend`.

It knows its weights, and one batch of tokens with their places in KV pages. It does not know
devices, requests, schedules or owners of pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.block_parts import Norm
from aioserve.models.blocks import DecoderLayer, ResidualStream
from aioserve.models.config import DecoderConfig
from aioserve.models.rotary import RotaryTable
from aioserve.models.weight_memory import WeightMemory
from aioserve.ops import (
    Backend,
    Batch,
    Drawn,
    Embedding,
    KVCache,
    KVShape,
    LayerOps,
    Linear,
    LogitEdits,
    SampleRows,
    StepProgram,
    TensorOps,
)
from aioserve.ops.kv_cache import format_of_floats
from aioserve.paging.format import KVFormat
from aioserve.paging.layout import KVLayout, kv_layout

__all__ = ["Decoder", "DecoderWeights"]

X = TypeVar("X")


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    dtype: torch.dtype
    embedding: Embedding
    """[vocab, hidden]."""
    positions: Tensor | None
    """Learned position embeddings [max_position_embeddings, hidden], or None."""
    rotary_tables: tuple[RotaryTable, ...]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: Linear
    """Output layer [vocab, hidden], with float32 results."""
    linears: Mapping[architecture.Linear, Linear]
    """All linear layers, by their descriptions."""
    memory: WeightMemory


class Decoder:
    """Loaded model. Only one thread at a time may use it.

    - max_model_len: longest context that it will compute, in tokens.
    - use_program: run all ops of a step in one call, if the backend can record them. Results have
      the same bits either way.
    - grouped: False keeps all positions of all layers, in one group of KV pages.
    - kept_layers: indices of layers whose input, the residual stream [T, hidden], is kept in each
      step. The number of layers stands for the output of the last one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        backend: Backend,
        max_model_len: int,
        *,
        use_program: bool = True,
        grouped: bool = True,
        kept_layers: Sequence[int] = (),
    ) -> None:
        self.config = config
        self._kept_layers = tuple(kept_layers)
        self._states: Tensor | None = None
        self.dtype: torch.dtype = weights.dtype
        """Dtype of activations, and of weights that are held as floats."""
        self.kv_format: KVFormat = format_of_floats(self.dtype)
        """Format of the KV pages: the dtype of activations."""
        self.weight_memory: WeightMemory = weights.memory
        self.linears: Mapping[architecture.Linear, Linear] = weights.linears
        """Linear layers, by their descriptions."""
        layers = config.kv_layers(self.kv_format)
        self.layout: KVLayout = kv_layout(layers, max_model_len, grouped=grouped)
        """Groups of layers that share KV pages."""
        self.backend = backend
        self.max_model_len = max_model_len
        self._weights = weights
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=self.dtype).item()
        self.program: StepProgram | None = None
        """Recorded ops of a step; None: each op is called on its own."""
        if use_program:
            self.program = backend.record(self.compute, self.kv_shape(1, 1), self.dtype)

    @property
    def embedding(self) -> Embedding:
        """Embedding [vocab, hidden], without `embedding_scale`."""
        return self._weights.embedding

    @property
    def head(self) -> Linear:
        """Output layer [vocab, hidden], with float32 results, before scale and cap."""
        return self._weights.head

    @property
    def kept_columns(self) -> int:
        """Columns of `kept_states`, which has the `kept_layers` side by side."""
        return len(self._kept_layers) * self.config.hidden_size

    @property
    def kept_states(self) -> Tensor:
        """States kept of the last batch: [T, kept_columns] in `dtype`, valid until the next batch.

        Raises ValueError if there are no `kept_layers` or no batch was computed."""
        if self._states is None:
            raise ValueError("kept_layers must name a layer before states are there")
        return self._states

    @torch.inference_mode()
    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm: output of the last layer to input of `head`, both [S, hidden]."""
        return self._weights.final_norm(self.backend, states)

    def kv_shape(self, num_pages: int, page_size: int) -> KVShape:
        """Sizes of this model's KV cache of `num_pages` pages."""
        return KVShape(self.layout, num_pages, page_size, self.config.latent_rank)

    def new_cache(self, num_pages: int, page_size: int, *, on_host: bool = False) -> KVCache:
        backend, shape = self.backend, self.kv_shape(num_pages, page_size)
        return backend.allocate_host_kv(shape) if on_host else backend.allocate_kv(shape)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write the batch's keys and values into `kv`; return logits, float32 [S, vocab].

        Raises ValueError for positions beyond `max_model_len`.
        """
        self.cover(batch.end_position)
        states = self._room(batch)
        if self.program is not None:
            return self.program.logits(batch, kv, states)
        return self.compute(TensorOps(self.backend, batch, kv, states))

    @torch.inference_mode()
    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: Tensor,
        edits: LogitEdits | None = None,
    ) -> Drawn:
        """`forward`, then `Backend.draw` from its logits, changed by `edits`."""
        if self.program is not None:
            self.cover(batch.end_position)
            states = self._room(batch)
            return self.program.draw(batch, kv, rows, last_tokens, edits, states)
        logits = self.forward(batch, kv)
        if edits is not None:
            edits.apply(logits)
        return self.backend.draw(logits, rows, last_tokens)

    def cover(self, end_position: int) -> None:
        """Extend rotary tables to positions below `end_position`. Steps do this themselves.

        Raises ValueError for positions beyond `max_model_len`.
        """
        limit = self.max_model_len
        if end_position > limit:
            raise ValueError(f"end_position must be at most {limit}, got {end_position}")
        for table in self._weights.rotary_tables:
            table.cover(end_position)

    def make_room(self, num_tokens: int) -> None:
        """Allocate the kept states of a batch of `num_tokens` tokens. Steps do this themselves."""
        if self._kept_layers and (self._states is None or len(self._states) != num_tokens):
            shape = num_tokens, self.kept_columns
            self._states = torch.empty(shape, dtype=self.dtype, device=self.backend.device)

    def leave_room(self) -> None:
        """Drop the kept states, so that the next batch allocates new memory for them.

        A graph that is being captured needs memory of its own."""
        self._states = None

    @torch.inference_mode()
    def forward_pooled(
        self, batch: Batch, kv: KVCache, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute like `forward`, op by op, but sum up hidden states for the last `logit_rows`.

        The last `sum(counts)` rows get no logits. Each count sums the hidden states of as many
        consecutive rows of these. Returns the logits of the other rows, and the sums, float32
        [len(counts), hidden]."""
        self.cover(batch.end_position)
        ops = TensorOps(self.backend, batch, kv, self._room(batch))
        hidden = self.hidden_states(ops)
        num_logits = len(hidden) - sum(counts)
        sums = _sums(hidden[num_logits:], counts)
        return self._logits(ops, hidden[:num_logits]), sums

    def compute(self, ops: LayerOps[X]) -> X:
        """Compute logits with the ops of one batch, or record their computation."""
        return self._logits(ops, self.hidden_states(ops))

    def hidden_states(self, ops: LayerOps[X]) -> X:
        """Compute hidden states after the final norm, for the rows whose logits are wanted."""
        weights = self._weights
        residual = ops.embed(weights.embedding)
        if self._embedding_scale != 1.0:
            ops.scale(residual, self._embedding_scale)
        if weights.positions is not None:
            ops.add_positions(residual, weights.positions)
        stream = ResidualStream(ops, residual)
        last = len(weights.layers) - 1
        keeps_all = last + 1 in self._kept_layers
        for index, layer in enumerate(weights.layers):
            self._keep(stream, index)
            layer(stream, logit_rows_only=index == last and not keeps_all)
        if keeps_all:
            self._keep(stream, last + 1)
            stream.keep_logit_rows()
        return stream.normed(weights.final_norm)

    def _keep(self, stream: ResidualStream[X], layer: int) -> None:
        for place, kept in enumerate(self._kept_layers):
            if kept == layer:
                stream.ops.tap(stream.normed(None), place * self.config.hidden_size)

    def _room(self, batch: Batch) -> Tensor | None:
        if self._kept_layers:
            self.make_room(len(batch.token_ids))
        return self._states

    def _logits(self, ops: LayerOps[X], hidden: X) -> X:
        logits = ops.linear(hidden, self._weights.head)
        if self.config.logit_scale != 1.0:
            ops.scale(logits, self.config.logit_scale)
        if self.config.final_soft_cap:
            ops.soft_cap(logits, self.config.final_soft_cap)
        return logits


def _sums(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum up consecutive rows, as many as each count: float32 [len(counts), columns]."""
    if len(counts) == len(rows):  # each count is 1, as for last tokens
        return rows.to(torch.float32)
    parts = rows.split(list(counts))
    return torch.stack([part.sum(dim=0, dtype=torch.float32) for part in parts])
