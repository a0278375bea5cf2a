"""A decoder-only transformer over a `Backend`, as its `DecoderConfig` describes it.

Knows weights and one batch of tokens with their places in the KV pages. Knows nothing about
devices, requests, schedules or who owns a page.
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
    """[max_position_embeddings, hidden] where positions are learned."""
    rotary_tables: tuple[RotaryTable, ...]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: Linear
    """[vocab, hidden], float32 results."""
    linears: Mapping[architecture.Linear, Linear]
    """All linear layers by their descriptions."""
    memory: WeightMemory


class Decoder:
    """A loaded model. Computes for one thread at a time.

    `max_model_len`: the longest context in tokens that it will be given. `use_program`: run all ops
    of a step by one call, where the backend can record them; the same bits either way.
    `grouped=False`: KV pages of one group, which keep all positions, as `kv_layout` has them.
    `kept_layers`: layers whose input, the residual stream [T, hidden], is kept in each step,
    counted from 0; the number of layers stands for what leaves the last one.
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
        """Format of the KV pages: activations as they are."""
        self.weight_memory: WeightMemory = weights.memory
        self.linears: Mapping[architecture.Linear, Linear] = weights.linears
        """Linear layers by their descriptions."""
        layers = config.kv_layers(self.kv_format)
        self.layout: KVLayout = kv_layout(layers, max_model_len, grouped=grouped)
        """Which layers share a KV page."""
        self.backend = backend
        self.max_model_len = max_model_len
        self._weights = weights
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=self.dtype).item()
        self.program: StepProgram | None = None
        """The recorded ops; None where each op is called by itself."""
        if use_program:
            self.program = backend.record(self.compute, self.kv_shape(1, 1), self.dtype)

    @property
    def embedding(self) -> Embedding:
        """[vocab, hidden], before `embedding_scale`."""
        return self._weights.embedding

    @property
    def head(self) -> Linear:
        """Output layer [vocab, hidden], float32 results, before scale and cap."""
        return self._weights.head

    @property
    def kept_columns(self) -> int:
        """Number of columns of `kept_states`: `kept_layers` side by side."""
        return len(self._kept_layers) * self.config.hidden_size

    @property
    def kept_states(self) -> Tensor:
        """What the batch that was computed last has kept, until the next one: [T, kept_columns] in
        `dtype`. Raises ValueError where nothing is kept."""
        if self._states is None:
            raise ValueError("kept_layers must name a layer before states are there")
        return self._states

    @torch.inference_mode()
    def normed(self, states: Tensor) -> Tensor:
        """What `head` reads of what the last layer gave, both [S, hidden]."""
        return self._weights.final_norm(self.backend, states)

    def kv_shape(self, num_pages: int, page_size: int) -> KVShape:
        """Sizes of KV pages for this model."""
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
        """Make the tables that positions below this one need, which steps do by themselves.

        Raises ValueError for positions beyond `max_model_len`.
        """
        limit = self.max_model_len
        if end_position > limit:
            raise ValueError(f"end_position must be at most {limit}, got {end_position}")
        for table in self._weights.rotary_tables:
            table.cover(end_position)

    def make_room(self, num_tokens: int) -> None:
        """Make room for what a batch of so many tokens keeps, which steps do by themselves."""
        if self._kept_layers and (self._states is None or len(self._states) != num_tokens):
            shape = num_tokens, self.kept_columns
            self._states = torch.empty(shape, dtype=self.dtype, device=self.backend.device)

    def leave_room(self) -> None:
        """Give up what the last batch has kept: the next one takes other memory, such as that of a
        graph which is being captured."""
        self._states = None

    @torch.inference_mode()
    def forward_pooled(
        self, batch: Batch, kv: KVCache, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute as `forward` does, op by op, but no logits of the last `sum(counts)` of the
        batch's `logit_rows`. Return those of the others, and sums of hidden states: of so many of
        the last rows each, one after the other, float32 [len(counts), hidden]."""
        self.cover(batch.end_position)
        ops = TensorOps(self.backend, batch, kv, self._room(batch))
        hidden = self.hidden_states(ops)
        num_logits = len(hidden) - sum(counts)
        sums = _sums(hidden[num_logits:], counts)
        return self._logits(ops, hidden[:num_logits]), sums

    def compute(self, ops: LayerOps[X]) -> X:
        """Logits, from the ops of one batch or of a recording."""
        return self._logits(ops, self.hidden_states(ops))

    def hidden_states(self, ops: LayerOps[X]) -> X:
        """Hidden states behind the final norm, of the rows whose logits are wanted."""
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
                stream.ops.keep(stream.normed(None), place * self.config.hidden_size)

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
    """Sums of so many rows each, one after the other: float32 [len(counts), columns]."""
    if len(counts) == len(rows):  # one each, as of last tokens
        return rows.to(torch.float32)
    parts = rows.split(list(counts))
    return torch.stack([part.sum(dim=0, dtype=torch.float32) for part in parts])
