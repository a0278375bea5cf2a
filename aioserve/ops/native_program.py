"""Step programs of the native backend: recorded here, run by `aioserve._native` without the GIL.

A recorded op checks its weights as the op itself would, so a run only has the batch and the pages
left to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.batch import Batch, Drawn, SampleRows
from aioserve.ops.checks import (
    ACTIVATIONS,
    Activation,
    AttentionKind,
    HeadNorms,
    LayerNorm,
    RMSNorm,
    Rotation,
    check_attention,
    check_head_norms,
    check_rotation,
    check_tensor,
    own,
)
from aioserve.ops.experts import Mixture
from aioserve.ops.kv_cache import KVCache, KVShape
from aioserve.ops.layer_ops import Embedding, LayerOps, LogitEdits, RotarySource, StepProgram
from aioserve.ops.linear import Linear, PerHeadLinear
from aioserve.ops.native_experts import NativeMixture
from aioserve.ops.native_sampler import NativeSampler
from aioserve.ops.native_types import (
    CPU,
    address,
    is_bfloat16,
    own_arrays,
    own_linear,
    own_pages,
    own_per_head,
)

__all__ = ["NativeProgram"]

NO_VALUE = -1
NO_ROTATION = -1


@dataclass(frozen=True, slots=True)
class Value:
    """Result of a recorded op."""

    index: int
    columns: int


class NativeProgram(StepProgram):
    """Program of what `forward` computes over KV pages of this shape. Used by one thread at a
    time."""

    def __init__(
        self,
        forward: Callable[[LayerOps[Any]], Any],
        shape: KVShape,
        dtype: torch.dtype,
        sampler: NativeSampler,
    ) -> None:
        ops = _RecordedOps(shape, dtype)
        logits = forward(ops)
        ops.program.finish(logits.index)
        self._vocab = logits.columns
        self.state_columns: int = ops.state_columns
        """Number of columns that it keeps."""
        self.given_columns: int = ops.given_columns
        """Number of columns of the rows that it is given."""
        self._dtype = dtype
        self._program = ops.program
        self._kept = ops.kept
        self._rotations: list[tuple[RotarySource, Rotation | None]] = [
            (source, None) for source in ops.rotations
        ]
        self._rotated = shape.head_dim - shape.latent_rank
        self._sampler = sampler

    def logits(
        self,
        batch: Batch,
        kv: KVCache,
        states: Tensor | None = None,
        hidden_in: Tensor | None = None,
    ) -> Tensor:
        logits = torch.empty((len(batch.logit_rows), self._vocab), dtype=torch.float32)
        self._run(batch, kv, states, hidden_in, logits.data_ptr(), 0, 0, 0)
        return logits

    def draw(
        self,
        batch: Batch,
        kv: KVCache,
        rows: SampleRows,
        last_tokens: Tensor,
        edits: LogitEdits | None = None,
        states: Tensor | None = None,
        hidden_in: Tensor | None = None,
    ) -> Drawn:
        count = len(batch.logit_rows)
        if count != len(rows.slots):
            raise ValueError(f"rows must be {count} as the batch's logit_rows, got {len(rows)}")
        largest = self._sampler.room(count)
        # The model's last layer gives the largest logit of each row. Most rows need nothing else.
        kept = rows["temperature"] > 0
        if edits is not None:
            kept[list(edits.rows)] = True
        if not kept.any():
            self._run(batch, kv, states, hidden_in, 0, 0, *largest.addresses)
            return self._sampler.draw(largest, None, rows, last_tokens)
        logits = torch.empty((count, self._vocab), dtype=torch.float32)
        outputs = logits.data_ptr(), kept.ctypes.data, *largest.addresses
        self._run(batch, kv, states, hidden_in, *outputs)
        if edits is not None:
            edits.apply(logits)
            largest.look_again(logits, edits.rows)
        return self._sampler.draw(largest, logits.numpy(), rows, last_tokens)

    def measure(self, on: bool) -> None:
        """Start counting the time of each kind of op, from zero, or stop that."""
        self._program.measure(on)

    @property
    def nanoseconds(self) -> Mapping[str, int]:
        """Nanoseconds of all runs since measuring began, by kind of op: linear, attention,
        rowwise."""
        return self._program.nanoseconds

    def _run(
        self,
        batch: Batch,
        kv: KVCache,
        states: Tensor | None,
        hidden_in: Tensor | None,
        *outputs: int,
    ) -> None:
        """Run the program. `outputs` are addresses as in `aioserve::program::Outputs`."""
        if states is not None:
            rows = batch.logit_rows if self._program.keeps_logit_rows else batch.token_ids
            check_tensor("states", states, self._dtype, (len(rows), self.state_columns), CPU)
        if hidden_in is not None:
            shape = len(batch.token_ids), self.given_columns
            check_tensor("hidden_in", hidden_in, self._dtype, shape, CPU)
        for i, (source, known) in enumerate(self._rotations):
            if source.rotation is not known:
                self._set_rotation(i, source)
        arrays, pages = own_arrays(batch), own_pages(kv)
        hidden_in_at = 0 if hidden_in is None else address(hidden_in)
        states_at = 0 if states is None else address(states)
        self._program.run(
            arrays, pages, batch.token_ids.data_ptr(), hidden_in_at, states_at, *outputs
        )

    def _set_rotation(self, index: int, source: RotarySource) -> None:
        rotation = source.rotation
        positions, _ = check_rotation(rotation, self._rotated, CPU)
        tables = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        self._program.set_rotation(index, *tables, address(rotation.query_scale), positions)
        self._rotations[index] = (source, rotation)


class _RecordedOps(LayerOps[Value]):
    """Records each op into `program`, and holds on to the weights that it reads in `kept`."""

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        sizes = shape.num_kv_heads, shape.head_dim, shape.latent_rank
        self.program = _native.Program(is_bfloat16("dtype", dtype), *sizes)
        self.kept: list[Any] = []
        self.rotations: list[RotarySource] = []
        self.state_columns = 0
        self.given_columns = 0
        self._shape = shape
        self._dtype = dtype
        self._head_dim = shape.head_dim

    def embed(self, table: Embedding) -> Value:
        if isinstance(table, Linear):
            layer = own_linear(table)
            shape = layer.out_features, layer.in_features
            return Value(self.program.packed_embedding(layer.packed, *shape), shape[1])
        rows, columns = table.shape
        at = self._vector("table", table, (rows, columns))
        return Value(self.program.embedding(at, rows, columns), columns)

    def hidden_in(self, columns: int) -> Value:
        self.given_columns = columns
        return Value(self.program.hidden_in(columns), columns)

    def concat(self, x: Value, y: Value) -> Value:
        return Value(self.program.concat(x.index, y.index), x.columns + y.columns)

    def scatter_columns(self, x: Value, columns: Tensor, size: int) -> Value:
        check_tensor("columns", columns, torch.int64, (x.columns,), CPU)
        if not 0 <= int(columns.min()) <= int(columns.max()) < size:
            raise ValueError(f"columns must be from 0 to {size - 1}")
        self.kept.append(columns)
        return Value(self.program.scatter_columns(x.index, columns.data_ptr(), size), size)

    def add_positions(self, x: Value, table: Tensor) -> None:
        at = self._vector("table", table, (table.shape[0], x.columns))
        self.program.add_positions(x.index, at, table.shape[0])

    def add(self, x: Value, y: Value) -> None:
        self.program.add(x.index, y.index)

    def norm_columns(self, x: Value, norm: RMSNorm, first: int) -> None:
        size = norm.weight.shape[0]
        at = self._vector("weight", norm.weight, (size,))
        self.program.norm_columns(x.index, first, size, at, norm.eps, norm.weight_offset)

    def scale(self, x: Value, factor: float) -> None:
        self.program.scale(x.index, factor)

    def linear(self, x: Value, layer: Linear) -> Value:
        own = own_linear(layer)
        float32 = own.out_dtype is torch.float32
        sizes = own.in_features, own.out_features
        return Value(self.program.linear(x.index, own.packed, *sizes, float32), own.out_features)

    def rms_norm(self, x: Value, norm: RMSNorm, residual: Value | None = None) -> Value:
        at = self._vector("weight", norm.weight, (x.columns,))
        added = NO_VALUE if residual is None else residual.index
        index = self.program.rms_norm(x.index, added, at, norm.eps, norm.weight_offset)
        return Value(index, x.columns)

    def layer_norm(self, x: Value, norm: LayerNorm, residual: Value | None = None) -> Value:
        at = self._vector("weight", norm.weight, (x.columns,))
        bias_at = 0 if norm.bias is None else self._vector("bias", norm.bias, (x.columns,))
        added = NO_VALUE if residual is None else residual.index
        return Value(self.program.layer_norm(x.index, added, at, bias_at, norm.eps), x.columns)

    def rotary_kv_write(
        self, qkv: Value, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None:
        q_norm_at = k_norm_at = 0
        eps = weight_offset = 0.0
        if norms is not None:
            check_head_norms(norms, self._head_dim, self._dtype, CPU)
            self.kept.append(norms)
            q_norm_at, k_norm_at = norms.query.data_ptr(), norms.key.data_ptr()
            eps, weight_offset = norms.eps, norms.weight_offset
        rotation = NO_ROTATION if rotary is None else self._rotation(rotary)
        self.program.rotary_kv_write(
            qkv.index, layer, rotation, q_norm_at, k_norm_at, eps, weight_offset
        )

    def _rotation(self, source: RotarySource) -> int:
        for i, known in enumerate(self.rotations):
            if known is source:
                return i
        rotated = self._head_dim - self._shape.latent_rank
        _, half = check_rotation(source.rotation, rotated, CPU)
        self.rotations.append(source)
        return self.program.add_rotation(half, source.rotation.interleaved)

    def per_head(self, x: Value, layer: PerHeadLinear) -> Value:
        own = own_per_head(layer)
        self.kept.append(own)
        return Value(self.program.per_head(x.index, own.kernel), own.out_columns)

    def latent_write(
        self, queries: Value, latents: Value, layer: int, rotary: RotarySource, norm: RMSNorm
    ) -> None:
        at = self._vector("norm.weight", norm.weight, (self._shape.latent_rank,))
        if rotary.rotation.query_scale is not None:
            raise ValueError("rotation: queries of latents have no query_scale")
        rotation = self._rotation(rotary)
        self.program.latent_write(
            queries.index, latents.index, layer, rotation, at, norm.eps, norm.weight_offset
        )

    def paged_attention(
        self, qkv: Value, layer: int, kind: AttentionKind, *, logit_rows_only: bool
    ) -> Value:
        shape = self._shape
        others = 0 if shape.latent_rank else 2 * shape.num_kv_heads
        q_heads = qkv.columns // shape.head_dim - others
        check_attention(kind, None, 0, q_heads, CPU)
        self.kept.append(kind)
        bounds = kind.scale, kind.soft_cap, kind.window, address(kind.sinks)
        index = self.program.attention(qkv.index, layer, *bounds, logit_rows_only)
        return Value(index, q_heads * (shape.latent_rank or shape.head_dim))

    def gated(self, gate_up: Value, *, gelu: bool) -> Value:
        return Value(self.program.gated(gate_up.index, gelu), gate_up.columns // 2)

    def activated(self, x: Value, kind: Activation) -> Value:
        return Value(self.program.activation(x.index, ACTIVATIONS.index(kind)), x.columns)

    def experts(self, x: Value, scores: Value, mixture: Mixture) -> Value:
        made = own("mixture", mixture, NativeMixture, "made")
        self.kept.append(made)
        index = self.program.experts(x.index, scores.index, made.packed, made.packed_routing)
        return Value(index, x.columns)

    def sigmoid_scale(self, x: Value, gate: Value) -> None:
        self.program.sigmoid_scale(x.index, gate.index)

    def logit_rows(self, x: Value) -> Value:
        return Value(self.program.logit_rows(x.index), x.columns)

    def tap(self, x: Value, column: int) -> None:
        self.program.tap(x.index, column)
        self.state_columns = max(self.state_columns, column + x.columns)

    def soft_cap(self, logits: Value, cap: float) -> None:
        self.program.soft_cap(logits.index, cap)

    def _vector(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> int:
        """Address of a tensor that stays as long as the program."""
        check_tensor(name, tensor, self._dtype, shape, CPU)
        self.kept.append(tensor)
        return tensor.data_ptr()
