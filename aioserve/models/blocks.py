"""The blocks that decoders are made of, over a `Backend`: norms, attention, MLPs.

Each is made from its description in `architecture` and from weights that somebody else reads.
Plain objects, since the Python of a step runs once per layer and token.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aioserve.models import architecture
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, Batch, KVCache, Linear
from aioserve.ops.backend import HeadNorms

__all__ = ["DecoderLayer", "DenseMLP", "LayerNorm", "Norm", "PagedAttention", "RMSNorm", "Weights"]


class Weights(Protocol):
    """Where a block gets what it is made of."""

    backend: Backend

    def linear(self, described: architecture.Linear) -> Linear: ...

    def vector(self, tensor: architecture.Tensor) -> Tensor: ...

    def rotary(self, rope: RopeConfig) -> RotaryTable:
        """One table for all layers that rotate alike."""
        ...


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place, then its norm."""
        ...


class RMSNorm:
    __slots__ = ("_add_norm", "_eps", "_norm", "_offset", "_weight")

    def __init__(self, described: architecture.Norm, weights: Weights) -> None:
        self._weight = weights.vector(described.weight)
        self._eps, self._offset = described.eps, described.weight_offset
        self._norm, self._add_norm = weights.backend.rms_norm, weights.backend.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self._weight, self._eps, self._offset)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._add_norm(x, residual, self._weight, self._eps, self._offset)


class LayerNorm:
    __slots__ = ("_bias", "_eps", "_norm", "_weight")

    def __init__(self, described: architecture.Norm, weights: Weights) -> None:
        self._weight = weights.vector(described.weight)
        self._bias = None if described.bias is None else weights.vector(described.bias)
        self._eps = described.eps
        self._norm = weights.backend.layer_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(residual.add_(x))


def norm(described: architecture.Norm, weights: Weights) -> Norm:
    return (RMSNorm if described.bias is None else LayerNorm)(described, weights)


class PagedAttention:
    """Projects, rotates, writes keys and values to their pages, attends, projects back."""

    def __init__(self, described: architecture.Attention, layer: int, weights: Weights) -> None:
        self._layer = layer
        self._backend = weights.backend
        self._qkv = weights.linear(described.qkv)
        self._norms = _head_norms(described, weights)
        self._output = weights.linear(described.output)
        self._rotary = None if described.rope is None else weights.rotary(described.rope)
        self._scale = described.scale
        self._window = described.window
        self._soft_cap = described.soft_cap

    def __call__(self, x: Tensor, batch: Batch, kv: KVCache, rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or only these rows of it."""
        backend, layer = self._backend, self._layer
        qkv = self._qkv(x)
        rotation = None if self._rotary is None else self._rotary.rotation
        backend.rotary_kv_write(qkv, batch, kv, layer, rotation, self._norms)
        if rows is not None and len(rows) == 0:
            return x[:0]
        attended = backend.paged_attention(
            qkv,
            batch,
            kv,
            layer,
            scale=self._scale,
            window=self._window,
            soft_cap=self._soft_cap,
        )
        return self._output(attended if rows is None else attended[rows])


def _head_norms(described: architecture.Attention, weights: Weights) -> HeadNorms | None:
    query, key = described.query_norm, described.key_norm
    if query is None or key is None:
        return None
    vectors = weights.vector(query.weight), weights.vector(key.weight)
    return HeadNorms(*vectors, query.eps, query.weight_offset)


class DenseMLP:
    def __init__(self, described: architecture.MLP, weights: Weights) -> None:
        backend = weights.backend
        self._up = weights.linear(described.up)
        self._down = weights.linear(described.down)
        if not described.gated:
            self._activate = backend.gelu_tanh
        elif described.activation == "silu":
            self._activate = backend.silu_mul
        else:
            self._activate = backend.gelu_tanh_mul

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(self._activate(self._up(x)))


class DecoderLayer:
    """residual += post_norm(attention(x)), then the same with the MLP."""

    def __init__(self, described: architecture.Layer, index: int, weights: Weights) -> None:
        self.attention_norm: Norm = norm(described.attention_norm, weights)
        self.attention: PagedAttention = PagedAttention(described.attention, index, weights)
        self.attention_post_norm: Norm | None = _optional(described.attention_post_norm, weights)
        self.mlp_norm: Norm = norm(described.mlp_norm, weights)
        self.mlp: DenseMLP = DenseMLP(described.mlp, weights)
        self.mlp_post_norm: Norm | None = _optional(described.mlp_post_norm, weights)


def _optional(described: architecture.Norm | None, weights: Weights) -> Norm | None:
    return None if described is None else norm(described, weights)
