"""Feed-forwards: the blocks that compute each token by itself, each made from its description."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from aioserve.models import architecture
from aioserve.models.block_parts import Weights
from aioserve.ops import LayerOps
from aioserve.ops.checks import Activation

__all__ = ["FeedForward", "make_feed_forward"]


X = TypeVar("X")


class FeedForward(Protocol):
    def __call__(self, ops: LayerOps[X], x: X) -> X:
        """[T, hidden] -> [T, hidden]."""
        ...


def make_feed_forward(described: architecture.FeedForward, weights: Weights) -> FeedForward:
    return _FEED_FORWARDS[type(described)](described, weights)


class DenseMLP:
    def __init__(self, described: architecture.MLP, weights: Weights) -> None:
        self._up = weights.linear(described.up)
        self._down = weights.linear(described.down)
        self._gated = described.gated
        self._activation = described.activation

    def __call__(self, ops: LayerOps[X], x: X) -> X:
        up = ops.linear(x, self._up)
        if self._gated:
            active = ops.gated(up, gelu=self._activation == "gelu_tanh")
        else:
            active = ops.activated(up, cast("Activation", self._activation))
        return ops.linear(active, self._down)


_FEED_FORWARDS = {architecture.MLP: DenseMLP}
