"""Layers of a decoder, and the residual stream that they add to.

A layer is made from its description in `architecture` and from loaded weights. The ops that it is
called with compute at once or record a step program. Its two blocks are in `mixers` and
`feed_forward`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from aioserve.models import architecture
from aioserve.models.block_parts import Norm, Weights
from aioserve.models.feed_forward import make_feed_forward
from aioserve.models.mixers import make_mixer
from aioserve.ops import LayerOps

__all__ = ["DecoderLayer", "ResidualStream"]


X = TypeVar("X")


class ResidualStream(Generic[X]):
    """Rows [T, hidden] that layers read and add to.

    Each addition waits for the norm that follows it, so that one op does both."""

    def __init__(self, ops: LayerOps[X], x: X) -> None:
        self.ops = ops
        self._x = x
        self._added: X | None = None

    def add(self, x: X) -> None:
        self._do_sum()
        self._added = x

    def normed(self, norm: Norm | None) -> X:
        """Return `norm` of the sum. If it is None, return the sum itself, which is read-only."""
        if norm is None:
            self._do_sum()
            return self._x
        if self._added is None:
            return norm(self.ops, self._x)
        added, self._added = self._added, None
        return norm(self.ops, added, self._x)

    def keep_logit_rows(self) -> None:
        """Drop all rows except those whose logits are wanted."""
        self._do_sum()
        self._x = self.ops.logit_rows(self._x)

    def _do_sum(self) -> None:
        if self._added is not None:
            self.ops.add(self._x, self._added)
            self._added = None


class DecoderLayer:
    """residual += scale * post_norm(mixer(x)), then the same with the feed-forward."""

    def __init__(self, described: architecture.Layer, index: int, weights: Weights) -> None:
        self._mixer_norm = _optional(described.mixer_norm, weights)
        self._mixer = make_mixer(described.mixer, index, weights)
        self._mixer_post_norm = _optional(described.mixer_post_norm, weights)
        self._feed_forward_norm = _optional(described.feed_forward_norm, weights)
        self._feed_forward = make_feed_forward(described.feed_forward, weights)
        self._feed_forward_post_norm = _optional(described.feed_forward_post_norm, weights)
        self._scale = described.residual_scale
        self._parallel = described.parallel

    def __call__(self, stream: ResidualStream[X], *, logit_rows_only: bool) -> None:
        """Add the outputs of both blocks to the stream.

        `logit_rows_only`: the mixer still reads every row, then only rows with logits go on."""
        ops = stream.ops
        x = stream.normed(self._mixer_norm)
        mixed = self._mixer(ops, x, logit_rows_only=logit_rows_only)
        if logit_rows_only:
            stream.keep_logit_rows()
        if self._parallel:
            if self._feed_forward_norm is not None:
                x = stream.normed(self._feed_forward_norm)
            elif logit_rows_only:
                x = ops.logit_rows(x)
            stream.add(self._after(ops, mixed, self._mixer_post_norm))
        else:
            stream.add(self._after(ops, mixed, self._mixer_post_norm))
            x = stream.normed(self._feed_forward_norm)
        stream.add(self._after(ops, self._feed_forward(ops, x), self._feed_forward_post_norm))

    def _after(self, ops: LayerOps[X], x: X, norm: Norm | None) -> X:
        if norm is not None:
            x = norm(ops, x)
        if self._scale != 1.0:
            ops.scale(x, self._scale)
        return x


def _optional(described: architecture.Norm | None, weights: Weights) -> Norm | None:
    return None if described is None else Norm(described, weights)
