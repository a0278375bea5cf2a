"""The blocks that decoders are made of: norms, attention, MLPs.

Each is made from its description in `architecture` and from weights that were read, and
computes with the ops that it is called with: at once, or into a step program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.reading import ReadWeights
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, LayerOps, Linear
from aioserve.ops.backend import AttentionKind, HeadNorms, LayerNorm, RMSNorm

__all__ = ["DecoderLayer", "DenseMLP", "Norm", "PagedAttention", "Weights"]


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
        weight, eps = weights.vector(described.weight), described.eps
        self._norm: RMSNorm | LayerNorm
        if described.bias is None:
            self._norm = RMSNorm(weight, eps, described.weight_offset)
        else:
            self._norm = LayerNorm(weight, weights.vector(described.bias), eps)

    def __call__(self, ops: LayerOps[X], x: X, residual: X | None = None) -> X:
        """[T, H] -> [T, H]: the norm of x, or of residual += x, which is done in place."""
        if isinstance(self._norm, RMSNorm):
            return ops.rms_norm(x, self._norm, residual)
        return ops.layer_norm(x, self._norm, residual)


class PagedAttention:
    """Projects, rotates, writes keys and values to their pages, attends, projects back."""

    def __init__(self, described: architecture.Attention, layer: int, weights: Weights) -> None:
        self._layer = layer
        self._qkv = weights.linear(described.qkv)
        self._norms = _head_norms(described, weights)
        self._output = weights.linear(described.output)
        self._rotary = None if described.rope is None else weights.rotary(described.rope)
        self._kind = AttentionKind(described.scale, described.window, described.soft_cap)

    def __call__(self, ops: LayerOps[X], x: X, *, logit_rows_only: bool = False) -> X:
        """x [T, hidden] -> [T, hidden], or only the rows whose logits are wanted."""
        qkv = ops.linear(x, self._qkv)
        ops.rotary_kv_write(qkv, self._layer, self._rotary, self._norms)
        attended = ops.paged_attention(
            qkv, self._layer, self._kind, logit_rows_only=logit_rows_only
        )
        return ops.linear(attended, self._output)


def _head_norms(described: architecture.Attention, weights: Weights) -> HeadNorms | None:
    query, key = described.query_norm, described.key_norm
    if query is None or key is None:
        return None
    vectors = weights.vector(query.weight), weights.vector(key.weight)
    return HeadNorms(*vectors, query.eps, query.weight_offset)


class DenseMLP:
    def __init__(self, described: architecture.MLP, weights: Weights) -> None:
        self._up = weights.linear(described.up)
        self._down = weights.linear(described.down)
        self._gated = described.gated
        self._gelu = described.activation == "gelu_tanh"

    def __call__(self, ops: LayerOps[X], x: X) -> X:
        """[T, hidden] -> [T, hidden]."""
        up = ops.linear(x, self._up)
        active = ops.gated(up, gelu=self._gelu) if self._gated else ops.gelu_tanh(up)
        return ops.linear(active, self._down)


class DecoderLayer:
    """residual += post_norm(attention(x)), then the same with the MLP."""

    def __init__(self, described: architecture.Layer, index: int, weights: Weights) -> None:
        self.attention_norm: Norm = Norm(described.attention_norm, weights)
        self.attention: PagedAttention = PagedAttention(described.attention, index, weights)
        self.attention_post_norm: Norm | None = _optional(described.attention_post_norm, weights)
        self.mlp_norm: Norm = Norm(described.mlp_norm, weights)
        self.mlp: DenseMLP = DenseMLP(described.mlp, weights)
        self.mlp_post_norm: Norm | None = _optional(described.mlp_post_norm, weights)


def _optional(described: architecture.Norm | None, weights: Weights) -> Norm | None:
    return None if described is None else Norm(described, weights)
