"""Mixtures of experts in C++: rows sorted by expert, one product for each expert that has rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aioserve import _native
from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.ops.checks import check_tensor
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.linear import Linear
from aioserve.ops.native_types import CPU, address, own_linear

__all__ = ["NativeMixture"]

_GATES = ("silu", "gelu_tanh", "clamped_swiglu")
"""All gates, in the order of `aioserve::mixture::GateKind`."""


class NativeMixture(Mixture):
    """Mixture in C++. A row's result depends on that row alone, to the last bit. The order of the
    experts matters only if scores are equal."""

    def __init__(
        self,
        routing: Routing,
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> None:
        super().__init__(routing, ups, downs, gate=gate, correction=correction)
        if correction is not None:
            check_tensor("correction", correction, torch.float32, correction.shape, CPU)
        self.packed: _native.Experts = _native.Experts(
            tuple(own_linear(up).packed for up in ups),
            tuple(own_linear(down).packed for down in downs),
            *_gate_arguments(gate),
        )
        self.packed_routing: _native.Routing = _native.Routing(
            routing.experts,
            routing.top_k,
            routing.sigmoid,
            routing.normalized,
            routing.scale,
            routing.groups,
            routing.top_groups,
            routing.group_best,
            address(correction),
        )

    def route(self, scores: Tensor) -> Routes:
        rows, routing = len(scores), self.routing
        check_tensor("scores", scores, torch.float32, (rows, routing.experts), CPU)
        ids = torch.empty((rows, routing.top_k), dtype=torch.int32)
        weights = torch.empty((rows, routing.top_k), dtype=torch.float32)
        self.packed_routing.route(scores.data_ptr(), rows, ids.data_ptr(), weights.data_ptr())
        return Routes(ids, weights)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        self._check(x, routes)
        y = torch.empty((len(x), self.hidden), dtype=x.dtype)
        at = x.data_ptr(), routes.ids.data_ptr(), routes.weights.data_ptr()
        self.packed.apply(*at, *routes.ids.shape, y.data_ptr())
        return y


def _gate_arguments(gate: ExpertGate) -> tuple[int, float, float]:
    """Number of the gate, its gain and its limit."""
    if isinstance(gate, ClampedSwiglu):
        return _GATES.index("clamped_swiglu"), gate.gain, gate.limit
    return _GATES.index(gate), 0.0, 0.0
