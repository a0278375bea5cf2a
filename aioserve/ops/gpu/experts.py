# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportArgumentType=false
"""Mixtures of experts on a GPU: rows sorted by expert, one launch for the products of all experts.

Experts are floats, multiplied by the kernel here, or small numbers (`grouped_experts`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.errors import UnsupportedModelError
from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.ops.checks import check_tensor
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.gpu import rowwise
from aioserve.ops.gpu.expert_pairs import ROWS, Pairs, sorted_pairs
from aioserve.ops.gpu.grouped_experts import GroupedExperts
from aioserve.ops.gpu.grouped_linear import FloatRun, GroupedLinear, GroupedRun
from aioserve.ops.linear import Linear
from aioserve.ops.reference import TorchLinear

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "SUM_TILE",
    "GpuMixture",
    "expert_kernel",
    "sum_kernel",
]

OUTPUTS = 64
INPUTS = 64
SUM_TILE = 512


@triton.jit(do_not_specialize=["out_features", "in_features", "out_stride", "experts"])
def expert_kernel(
    x,
    rows,
    weight,
    bias,
    out,
    block_experts,
    block_starts,
    block_ends,
    out_features,
    in_features,
    out_stride,
    experts,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (block, OUTPUTS outputs).

    x       [rows, in_features]
    rows    int32 [pairs]: of x, for each pair, sorted by expert
    weight  [experts, out_features, in_features]
    bias    [experts, out_features], with HAS_BIAS
    out     [pairs, out_features]
    block_experts, block_starts, block_ends  `Blocks`
    """
    block = tl.program_id(0)
    expert = tl.load(block_experts + block)
    if expert < experts:
        pairs = tl.load(block_starts + block) + tl.arange(0, ROWS)
        there = pairs < tl.load(block_ends + block)
        row = tl.load(rows + pairs, mask=there, other=0).to(tl.int64)
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        here = outputs < out_features
        inputs = tl.arange(0, INPUTS)
        output = expert.to(tl.int64) * out_features + outputs
        x_at = x + row[:, None] * in_features + inputs[None, :]
        weight_at = weight + output[:, None] * in_features + inputs[None, :]
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for first in tl.range(0, in_features, INPUTS):
            inside = (first + inputs < in_features)[None, :]
            some = tl.load(x_at + first, mask=there[:, None] & inside, other=0.0)
            part = tl.load(weight_at + first, mask=here[:, None] & inside, other=0.0)
            acc = tl.dot(part, tl.trans(some), acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias + output, mask=here, other=0.0).to(tl.float32)[:, None]
        out_at = out + pairs.to(tl.int64)[None, :] * out_stride + outputs[:, None]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def sum_kernel(
    parts,
    places,
    weights,
    out,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns): adds the weighted parts of a row, in the order of its
    experts.

    parts    float32 [pairs, SIZE], sorted by expert
    places   int32 [rows, TOP_K]: places of a row's parts; -1 for none
    weights  float32 [rows, TOP_K]
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    total = tl.zeros([TILE], tl.float32)
    for rank in range(TOP_K):
        place = tl.load(places + row * TOP_K + rank).to(tl.int64)
        factor = tl.load(weights + row * TOP_K + rank, mask=place >= 0, other=0.0)
        total += factor * tl.load(
            parts + place * SIZE + columns, mask=inside & (place >= 0), other=0.0
        )
    tl.store(out + row * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)


class FloatExperts:
    """Layers of floats of all experts as one tensor, of which the layers hold views."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [experts, out, in], bias [experts, out]."""
        self._weight, self._bias = weight, bias

    @classmethod
    def of(cls, runs: Sequence[FloatRun]) -> FloatExperts:
        weight = torch.stack([run.weight for run in runs])
        biases = [run.bias for run in runs if run.bias is not None]
        bias = torch.stack(biases) if biases else None
        for i, run in enumerate(runs):
            run.weight, run.bias = weight[i], None if bias is None else bias[i]
        return cls(weight, bias)

    @property
    def out_features(self) -> int:
        return self._weight.shape[1]

    def multiply(self, x: Tensor, pairs: Pairs, out: Tensor) -> None:
        """Fill out [pairs, out_features], whose rows may lie apart, for pairs with an expert."""
        experts, out_features, in_features = self._weight.shape
        expert_kernel[(len(pairs.blocks.experts), triton.cdiv(out_features, OUTPUTS))](
            x,
            pairs.rows,
            self._weight,
            self._weight if self._bias is None else self._bias,
            out,
            *pairs.blocks,
            out_features,
            in_features,
            out.stride(0),
            experts,
            HAS_BIAS=self._bias is not None,
            OUTPUTS=OUTPUTS,
            ROWS=ROWS,
            INPUTS=INPUTS,
        )


_Stacks = tuple[FloatExperts | GroupedExperts, ...]
"""Layers of all experts: the outputs of each follow those of the one before."""


class GpuMixture(Mixture):
    """Mixture on a GPU. A row is summed in one order, by one instruction, for any number of rows.

    Raises `UnsupportedModelError` for experts that aren't quantised alike.
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
        super().__init__(routing, ups, downs, gate=gate, correction=correction)
        self._up, self._down = _stacked(ups), _stacked(downs)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """Compute `Mixture.__call__`, without checking ids: the host would have to wait for
        them."""
        rows, top_k = routes.ids.shape
        check_tensor("x", x, self.dtype, (rows, self.hidden), x.device)
        out = torch.empty_like(x)
        if not rows:
            return out
        pairs, places = sorted_pairs(routes.ids, self.routing.experts)
        up = _multiply(x, pairs, self._up, x.dtype)
        if isinstance(self.gate, ClampedSwiglu):
            active = rowwise.clamped_swiglu(up, self.gate)
        else:
            active = rowwise.gated(up, self.gate == "gelu_tanh")
        each = torch.arange(len(active), dtype=torch.int32, device=x.device)
        parts = _multiply(active, pairs._replace(rows=each), self._down, torch.float32)
        sum_kernel[(rows, triton.cdiv(self.hidden, SUM_TILE))](
            parts,
            places,
            routes.weights,
            out,
            SIZE=self.hidden,
            TOP_K=top_k,
            TILE=SUM_TILE,
        )
        return out


def _stacked(layers: Sequence[Linear]) -> _Stacks:
    floats = [layer for layer in layers if isinstance(layer, TorchLinear)]
    if len(floats) == len(layers):
        return (FloatExperts(*TorchLinear.stacked(floats)),)
    kinds = sorted(
        {layer.kind if isinstance(layer, GroupedLinear) else "floats" for layer in layers}
    )
    if len(kinds) > 1:
        raise UnsupportedModelError(
            "a GPU multiplies all experts of a layer at once, so they must be quantised alike, got "
            f"{' and '.join(kinds)}: load them with device='cpu'"
        )
    runs = zip(*(layer.runs for layer in layers if isinstance(layer, GroupedLinear)), strict=True)
    return tuple(map(_stack_of, runs))


def _stack_of(runs: Sequence[GroupedRun | FloatRun]) -> FloatExperts | GroupedExperts:
    """Stack runs of the same kind."""
    floats = [run for run in runs if isinstance(run, FloatRun)]
    if floats:
        return FloatExperts.of(floats)
    return GroupedExperts([run for run in runs if isinstance(run, GroupedRun)])


def _multiply(x: Tensor, pairs: Pairs, stacks: _Stacks, dtype: torch.dtype) -> Tensor:
    """[pairs, out]: the rows of x, each times its expert's weight."""
    sizes = [stack.out_features for stack in stacks]
    # Pairs without an expert get zeros, so results made from them are finite.
    out = torch.zeros((len(pairs.rows), sum(sizes)), dtype=dtype, device=x.device)
    for stack, part in zip(stacks, out.split(sizes, dim=1), strict=True):
        stack.multiply(x, pairs, part)
    return out
