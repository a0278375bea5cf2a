"""The blocks that decoders are made of: norms, attention, MLPs.

Each is made from its description in `architecture` and from weights that were read, and
computes with the ops that it is called with: at once, or into a step program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.reading import ReadWeights
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, LayerOps, Linear
from aioserve.ops.backend import AttentionKind, HeadNorms, LayerNorm, RMSNorm
from aioserve.ops.checks import Activation

__all__ = ["DecoderLayer", "DenseMLP", "Norm", "PagedAttention", "ResidualStream", "Weights"]


X = TypeVar("X")


class Weights:
    """Weights that were read, as blocks take them to be computed by a backend: each once."""

    def __init__(self, read: ReadWeights, backend: Backend) -> None:
        self.backend = backend
        self.dtype: torch.dtype = getattr(torch, read.dtype)
        self._read = read
        self._tables: dict[RopeConfig, RotaryTable] = {}
        self.linears: dict[architecture.Linear, Linear] = {}
        """The layers that were made."""

    def linear(
        self, described: architecture.Linear, out_dtype: torch.dtype | None = None
    ) -> Linear:
        held = self._read.linears.pop(described, None)
        if held is not None:
            made = self.backend.linear(held, out_dtype=out_dtype)
        else:
            weight = self._stacked(described.weights, described.transposed)
            bias = self._stacked(described.biases) if described.biases else None
            made = self.backend.linear(weight, bias, out_dtype=out_dtype)
        self.linears[described] = made
        return made

    def vector(self, tensor: architecture.Tensor) -> Tensor:
        return self.backend.place(self._tensor(tensor))

    def rotary(self, rope: RopeConfig) -> RotaryTable:
        """One table for all layers that rotate alike."""
        if rope not in self._tables:
            limit = self._read.max_model_len
            self._tables[rope] = RotaryTable(rope, limit, self.backend.device)
        return self._tables[rope]

    @property
    def rotary_tables(self) -> tuple[RotaryTable, ...]:
        """Tables that blocks have asked for."""
        return tuple(self._tables.values())

    def _stacked(self, tensors: Sequence[architecture.Tensor], transposed: bool = False) -> Tensor:
        stored = [self._tensor(tensor) for tensor in tensors]
        return torch.cat([tensor.T for tensor in stored] if transposed else stored)

    def _tensor(self, tensor: architecture.Tensor) -> Tensor:
        return torch.from_numpy(self._read.arrays[tensor]).view(self.dtype)


class Norm:
    """An RMS norm or a LayerNorm."""

    def __init__(self, described: architecture.Norm, weights: Weights) -> None:
        self._norm: RMSNorm | LayerNorm
        if described.centered:
            self._norm = _layer_norm(described, weights)
        else:
            self._norm = _rms_norm(described, weights)

    def __call__(self, ops: LayerOps[X], x: X, residual: X | None = None) -> X:
        """[T, H] -> [T, H]: the norm of x, or of residual += x, which is done in place."""
        if isinstance(self._norm, RMSNorm):
            return ops.rms_norm(x, self._norm, residual)
        return ops.layer_norm(x, self._norm, residual)


def _rms_norm(described: architecture.Norm, weights: Weights) -> RMSNorm:
    return RMSNorm(weights.vector(described.weight), described.eps, described.weight_offset)


def _layer_norm(described: architecture.Norm, weights: Weights) -> LayerNorm:
    weight = weights.vector(described.weight)
    if described.weight_offset:
        weight = weight + described.weight_offset  # rounded, as transformers has it
    bias = None if described.bias is None else weights.vector(described.bias)
    return LayerNorm(weight, bias, described.eps)


class ResidualStream(Generic[X]):
    """The rows [T, hidden] that layers read and add to. A sum is done together with the norm that
    follows it."""

    def __init__(self, ops: LayerOps[X], x: X) -> None:
        self.ops = ops
        self._x = x
        self._added: X | None = None

    def add(self, x: X) -> None:
        self._do_sum()
        self._added = x

    def normed(self, norm: Norm | None) -> X:
        """The norm of the sum of all that was added; without one the sum itself, which is only to
        be read."""
        if norm is None:
            self._do_sum()
            return self._x
        if self._added is None:
            return norm(self.ops, self._x)
        added, self._added = self._added, None
        return norm(self.ops, added, self._x)

    def keep_logit_rows(self) -> None:
        """From here on it has only the rows whose logits are wanted."""
        self._do_sum()
        self._x = self.ops.logit_rows(self._x)

    def _do_sum(self) -> None:
        if self._added is not None:
            self.ops.add(self._x, self._added)
            self._added = None


class PagedAttention:
    """Projects, rotates, writes keys and values to their pages, attends, projects back."""

    def __init__(self, described: architecture.Attention, layer: int, weights: Weights) -> None:
        self._layer = layer
        self._qkv = weights.linear(described.qkv)
        self._norms = _head_norms(described, weights)
        self._norms_of_all_heads = _norms_of_all_heads(described, weights)
        self._output = weights.linear(described.output)
        self._rotary = None if described.rope is None else weights.rotary(described.rope)
        self._kind = AttentionKind(described.scale, described.window, described.soft_cap)

    def __call__(self, ops: LayerOps[X], x: X, *, logit_rows_only: bool = False) -> X:
        """x [T, hidden] -> [T, hidden], or only the rows whose logits are wanted."""
        qkv = ops.linear(x, self._qkv)
        for norm, first in self._norms_of_all_heads:
            ops.norm_columns(qkv, norm, first)
        ops.rotary_kv_write(qkv, self._layer, self._rotary, self._norms)
        attended = ops.paged_attention(
            qkv, self._layer, self._kind, logit_rows_only=logit_rows_only
        )
        return ops.linear(attended, self._output)


def _head_norms(described: architecture.Attention, weights: Weights) -> HeadNorms | None:
    query, key = described.query_norm, described.key_norm
    if query is None or key is None or described.norms_of_all_heads:
        return None
    vectors = weights.vector(query.weight), weights.vector(key.weight)
    return HeadNorms(*vectors, query.eps, query.weight_offset)


def _norms_of_all_heads(
    described: architecture.Attention, weights: Weights
) -> tuple[tuple[RMSNorm, int], ...]:
    """Norms of all queries and of all keys, with the first column of each."""
    query, key = described.query_norm, described.key_norm
    if query is None or key is None or not described.norms_of_all_heads:
        return ()
    return (
        (_rms_norm(query, weights), 0),
        (_rms_norm(key, weights), described.heads.query_size),
    )


class DenseMLP:
    def __init__(self, described: architecture.MLP, weights: Weights) -> None:
        self._up = weights.linear(described.up)
        self._down = weights.linear(described.down)
        self._gated = described.gated
        self._activation = described.activation

    def __call__(self, ops: LayerOps[X], x: X) -> X:
        """[T, hidden] -> [T, hidden]."""
        up = ops.linear(x, self._up)
        if self._gated:
            active = ops.gated(up, gelu=self._activation == "gelu_tanh")
        else:
            active = ops.activated(up, cast("Activation", self._activation))
        return ops.linear(active, self._down)


class DecoderLayer:
    """residual += scale * post_norm(attention(x)), then the same with the MLP."""

    def __init__(self, described: architecture.Layer, index: int, weights: Weights) -> None:
        self._attention_norm = _optional(described.attention_norm, weights)
        self._attention = PagedAttention(described.attention, index, weights)
        self._attention_post_norm = _optional(described.attention_post_norm, weights)
        self._mlp_norm = _optional(described.mlp_norm, weights)
        self._mlp = DenseMLP(described.mlp, weights)
        self._mlp_post_norm = _optional(described.mlp_post_norm, weights)
        self._scale = described.residual_scale
        self._parallel = described.parallel

    def __call__(self, stream: ResidualStream[X], *, logit_rows_only: bool) -> None:
        """Add to the stream. `logit_rows_only`: every key and value is written, and from attention
        on only rows with logits matter."""
        ops = stream.ops
        x = stream.normed(self._attention_norm)
        attended = self._attention(ops, x, logit_rows_only=logit_rows_only)
        if logit_rows_only:
            stream.keep_logit_rows()
        if self._parallel:
            if self._mlp_norm is not None:
                x = stream.normed(self._mlp_norm)
            elif logit_rows_only:
                x = ops.logit_rows(x)
            stream.add(self._after(ops, attended, self._attention_post_norm))
        else:
            stream.add(self._after(ops, attended, self._attention_post_norm))
            x = stream.normed(self._mlp_norm)
        stream.add(self._after(ops, self._mlp(ops, x), self._mlp_post_norm))

    def _after(self, ops: LayerOps[X], x: X, norm: Norm | None) -> X:
        if norm is not None:
            x = norm(ops, x)
        if self._scale != 1.0:
            ops.scale(x, self._scale)
        return x


def _optional(described: architecture.Norm | None, weights: Weights) -> Norm | None:
    return None if described is None else Norm(described, weights)
