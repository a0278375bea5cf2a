"""Feed-forwards: blocks that compute each token on its own, each made from its description."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import torch

from aioserve.errors import UnsupportedModelError
from aioserve.formats.routing import ClampedSwiglu
from aioserve.models import architecture
from aioserve.models.block_parts import Weights
from aioserve.ops import LayerOps
from aioserve.ops.checks import Activation
from aioserve.ops.experts import ExpertGate

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
        if isinstance(described.activation, ClampedSwiglu):
            raise UnsupportedModelError("a clamped SwiGLU is that of experts alone")
        self._activation = described.activation

    def __call__(self, ops: LayerOps[X], x: X) -> X:
        up = ops.linear(x, self._up)
        if self._gated:
            active = ops.gated(up, gelu=self._activation == "gelu_tanh")
        else:
            active = ops.activated(up, cast("Activation", self._activation))
        return ops.linear(active, self._down)


class SparseMLP:
    """Experts that a router chooses for each token, and a shared MLP for every token."""

    def __init__(self, described: architecture.Experts, weights: Weights) -> None:
        self._router = weights.linear(described.router, torch.float32)
        correction = described.correction
        self._mixture = weights.backend.mixture(
            described.routing,
            [weights.linear(one.up) for one in described.experts],
            [weights.linear(one.down, torch.float32) for one in described.experts],
            gate=cast("ExpertGate", described.experts[0].activation),
            correction=None if correction is None else weights.vector(correction),
        )
        self._shared = None if described.shared is None else DenseMLP(described.shared, weights)
        gate = described.shared_gate
        self._shared_gate = None if gate is None else weights.linear(gate, torch.float32)

    def __call__(self, ops: LayerOps[X], x: X) -> X:
        mixed = ops.experts(x, ops.linear(x, self._router), self._mixture)
        if self._shared is not None:
            shared = self._shared(ops, x)
            if self._shared_gate is not None:
                ops.sigmoid_scale(shared, ops.linear(x, self._shared_gate))
            ops.add(mixed, shared)
        return mixed


_FEED_FORWARDS = {architecture.Experts: SparseMLP, architecture.MLP: DenseMLP}
