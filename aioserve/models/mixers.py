"""Mixers: blocks in which a token attends to earlier ones, each made from its description."""

from __future__ import annotations

from typing import Protocol, TypeVar

from aioserve.models import architecture
from aioserve.models.block_parts import Weights, rms_norm
from aioserve.ops import LayerOps, Linear
from aioserve.ops.backend import AttentionKind, HeadNorms, RMSNorm

__all__ = ["Mixer", "make_mixer"]


X = TypeVar("X")


class Mixer(Protocol):
    def __call__(self, ops: LayerOps[X], x: X, *, logit_rows_only: bool) -> X:
        """x [T, hidden] -> [T, hidden], or with `logit_rows_only`, only the rows with logits.

        KV of all rows is cached in either case."""
        ...


def make_mixer(described: architecture.Mixer, layer: int, weights: Weights) -> Mixer:
    """Make the mixer of the layer with index `layer`."""
    return _MIXERS[type(described)](described, layer, weights)


class PagedAttention:
    """Attention over paged keys and values: project, rotate, write KV, attend, project back."""

    def __init__(self, described: architecture.Attention, layer: int, weights: Weights) -> None:
        self._layer = layer
        self._qkv = weights.linear(described.qkv)
        self._norms = _head_norms(described, weights)
        self._norms_of_all_heads = _norms_of_all_heads(described, weights)
        self._output = weights.linear(described.output)
        self._rotary = None if described.rope is None else weights.rotary(described.rope)
        sinks = None if described.sinks is None else weights.vector(described.sinks)
        self._kind = AttentionKind(described.scale, described.window, described.soft_cap, sinks)

    def __call__(self, ops: LayerOps[X], x: X, *, logit_rows_only: bool) -> X:
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
    """Norms of all queries and of all keys, each with its first column in the QKV rows."""
    query, key = described.query_norm, described.key_norm
    if query is None or key is None or not described.norms_of_all_heads:
        return ()
    return (
        (rms_norm(query, weights), 0),
        (rms_norm(key, weights), described.heads.query_size),
    )


class LatentAttention:
    """Attention in the space of latents, with "absorbed" key and value projections.

    Each head's query is multiplied by the transpose of its key projection, and the attended latents
    by its value projection. Prefill and decode both do so. Another order of products would round
    differently, and after a preemption decoded tokens become part of a prompt.
    """

    def __init__(
        self, described: architecture.LatentAttention, layer: int, weights: Weights
    ) -> None:
        self._layer = layer
        self._compressed: Linear | None = None
        self._query_norm: RMSNorm | None = None
        if described.compressed_query is not None and described.query_norm is not None:
            self._compressed = weights.linear(described.compressed_query)
            self._query_norm = rms_norm(described.query_norm, weights)
        self._query = weights.linear(described.query)
        self._latent = weights.linear(described.latent)
        self._latent_norm = rms_norm(described.latent_norm, weights)
        heads, key_dim, value_dim = described.heads.query, described.key_dim, described.value_dim
        expansion = weights.take(described.expansion).unflatten(0, (heads, key_dim + value_dim))
        to_keys, to_values = expansion.split([key_dim, value_dim], dim=1)
        per_head = weights.backend.per_head
        self._to_latents = per_head(to_keys.transpose(1, 2), described.rotated_dim)
        self._to_values = per_head(to_values)
        self._output = weights.linear(described.output)
        self._rotary = weights.rotary(described.rope)
        self._kind = AttentionKind(described.scale)

    def __call__(self, ops: LayerOps[X], x: X, *, logit_rows_only: bool) -> X:
        queries = ops.per_head(ops.linear(self._source(ops, x), self._query), self._to_latents)
        latents = ops.linear(x, self._latent)
        ops.latent_write(queries, latents, self._layer, self._rotary, self._latent_norm)
        attended = ops.paged_attention(
            queries, self._layer, self._kind, logit_rows_only=logit_rows_only
        )
        return ops.linear(ops.per_head(attended, self._to_values), self._output)

    def _source(self, ops: LayerOps[X], x: X) -> X:
        """Input of the query projection."""
        if self._compressed is None or self._query_norm is None:
            return x
        return ops.rms_norm(ops.linear(x, self._compressed), self._query_norm)


_MIXERS = {
    architecture.Attention: PagedAttention,
    architecture.LatentAttention: LatentAttention,
}
