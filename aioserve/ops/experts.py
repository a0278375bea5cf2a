"""Mixtures of experts in plain torch: the definition that faster ones are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.ops.checks import check_tensor
from aioserve.ops.linear import Linear

__all__ = ["ExpertGate", "Mixture", "Routes"]

ExpertGate = Literal["silu", "gelu_tanh"] | ClampedSwiglu
"""Function that makes `act(gate) * up` of gate and up."""


class Routes(NamedTuple):
    """Experts of each row, by falling score."""

    ids: Tensor
    """int32 `[T, top_k]`; -1 for no expert, whose part of the sum is 0."""
    weights: Tensor
    """float32 `[T, top_k]`."""


class Mixture:
    """Gated MLPs, `down(act(gate(x)) * up(x))`. Each row uses some of them.

    A row's result is the sum of its experts' results times their weights, in the order of its
    `Routes`. Sums are float32 and rounded once.

    - ups: `[2 * inner, hidden]` of each expert: the gate, then up.
    - downs: `[hidden, inner]` of each expert, with results in float32.
    - correction: float32 `[experts]`, added to the scores that choose, not to those that weigh.

    Raises ValueError if linear layers don't fit each other or `routing`.
    """

    def __init__(
        self,
        routing: Routing,
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> None:
        if not len(ups) == len(downs) == routing.experts:
            raise ValueError(
                f"ups and downs must be {routing.experts} each, got {len(ups)} and {len(downs)}"
            )
        self.routing = routing
        self.ups: tuple[Linear, ...] = tuple(ups)
        self.downs: tuple[Linear, ...] = tuple(downs)
        self.gate: ExpertGate = gate
        self.correction = correction
        self.hidden: int = ups[0].in_features
        self.inner: int = downs[0].in_features
        self.dtype: torch.dtype = ups[0].dtype
        sizes = {
            (up.in_features, up.out_features, down.in_features, down.out_features, up.dtype)
            for up, down in zip(ups, downs, strict=True)
        }
        expected = (self.hidden, 2 * self.inner, self.inner, self.hidden, self.dtype)
        if sizes != {expected} or {down.out_dtype for down in downs} != {torch.float32}:
            raise ValueError(
                "experts must be alike: gate and up from hidden to twice inner, down from inner to "
                f"hidden in float32, got {sorted(map(str, sizes))}"
            )
        if correction is not None and correction.shape != (routing.experts,):
            raise ValueError(
                f"correction must be of shape [{routing.experts}], got {list(correction.shape)}"
            )

    def route(self, scores: Tensor) -> Routes:
        """Experts of each row of a router's scores, float32 `[T, experts]`. A row with NaN or +inf,
        or with only -inf, has NaN weights."""
        routing = self.routing
        check_tensor("scores", scores, torch.float32, (len(scores), routing.experts), scores.device)
        own = scores.sigmoid() if routing.sigmoid else scores.softmax(-1)
        by_scores = routing.sigmoid or self.correction is not None or routing.group_best > 1
        keys = own if by_scores else scores  # a softmax makes some different scores equal
        if self.correction is not None:
            keys = keys + self.correction
        if routing.top_groups < routing.groups:
            grouped = keys.unflatten(1, (routing.groups, -1))
            best = grouped.topk(routing.group_best).values.sum(-1)
            chosen = _highest(best, routing.top_groups)
            left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            keys = grouped.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
        ids = _highest(keys, routing.top_k)
        if routing.normalized and not routing.sigmoid:
            weights = scores.gather(1, ids).softmax(-1)
        else:
            weights = own.gather(1, ids)
            if routing.normalized:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * routing.scale
        usable = (scores < float("inf")).all(-1) & (scores > float("-inf")).any(-1)
        weights = weights.masked_fill(~usable[:, None], float("nan"))
        return Routes(ids.int(), weights)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """x `[T, hidden]` contiguous -> `[T, hidden]` in the same dtype.

        Raises ValueError for an id that is no expert.
        """
        self._check(x, routes)
        top_k = routes.ids.shape[1]
        parts = torch.zeros((len(x) * top_k, self.hidden), dtype=torch.float32, device=x.device)
        ids = routes.ids.flatten()
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            pairs = (ids == expert).nonzero()[:, 0]
            gate, up = self.ups[expert](x[pairs // top_k]).float().chunk(2, dim=-1)
            parts[pairs] = self.downs[expert](_gated(self.gate, gate, up).to(x.dtype))
        out = torch.zeros((len(x), self.hidden), dtype=torch.float32, device=x.device)
        for rank, part in enumerate(parts.unflatten(0, (-1, top_k)).unbind(1)):
            weights = routes.weights[:, rank, None].masked_fill(routes.ids[:, rank, None] < 0, 0)
            out += part * weights
        return out.to(x.dtype)

    def _check(self, x: Tensor, routes: Routes) -> None:
        check_tensor("x", x, self.dtype, (len(x), self.hidden), x.device)
        shape = (len(x), routes.ids.shape[1])
        check_tensor("ids", routes.ids, torch.int32, shape, x.device)
        check_tensor("weights", routes.weights, torch.float32, shape, x.device)
        ids = routes.ids
        if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < len(self.ups):
            raise ValueError(f"ids must be from -1 to {len(self.ups) - 1}")


def _gated(kind: ExpertGate, gate: Tensor, up: Tensor) -> Tensor:
    if isinstance(kind, ClampedSwiglu):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return (up + 1) * gate * (gate * kind.gain).sigmoid()
    if kind == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def _highest(keys: Tensor, count: int) -> Tensor:
    """Columns of the highest of each row, the lowest of equal ones first."""
    return keys.argsort(dim=-1, descending=True, stable=True)[:, :count]
