"""Layers' ops on tensors, each at once on a backend: the plain path."""

from __future__ import annotations

from torch import Tensor

from aioserve.ops.backend import Backend
from aioserve.ops.batch import Batch
from aioserve.ops.checks import AttentionKind, HeadNorms, KVLayer
from aioserve.ops.kv_cache import KVCache
from aioserve.ops.layer_ops import Embedding, LayerOps, RotarySource
from aioserve.ops.linear import Linear

__all__ = ["TensorOps"]


class TensorOps(LayerOps[Tensor]):
    """Computes one batch over `kv`."""

    __slots__ = ("_backend", "_batch", "_kv")

    def __init__(self, backend: Backend, batch: Batch, kv: KVCache) -> None:
        self._backend = backend
        self._batch = batch
        self._kv = kv

    def embed(self, table: Embedding) -> Tensor:
        if isinstance(table, Linear):
            return table.rows(self._batch.token_ids)
        return self._backend.embedding(self._batch.token_ids, table)

    def add_positions(self, x: Tensor, table: Tensor) -> None:
        self._backend.add_rows(x, table, self._batch.positions)

    def scale(self, x: Tensor, factor: float) -> None:
        self._backend.scale(x, factor)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        return layer(x)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._backend.rms_norm(x, weight, eps, weight_offset, residual=residual)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._backend.layer_norm(x, weight, bias, eps, residual=residual)

    def rotary_kv_write(
        self, qkv: Tensor, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None:
        rotation = None if rotary is None else rotary.rotation
        at = KVLayer(self._batch, self._kv, layer)
        self._backend.rotary_kv_write(qkv, at, rotation, norms)

    def paged_attention(
        self, qkv: Tensor, layer: int, kind: AttentionKind, *, logit_rows_only: bool
    ) -> Tensor:
        at = KVLayer(self._batch, self._kv, layer)
        return self._backend.paged_attention(qkv, at, kind, logit_rows_only=logit_rows_only)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return self._backend.gated(gate_up, gelu=gelu)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return self._backend.gelu_tanh(x)

    def logit_rows(self, x: Tensor) -> Tensor:
        return x[self._batch.logit_rows]

    def soft_cap(self, logits: Tensor, cap: float) -> None:
        self._backend.soft_cap(logits, cap)
