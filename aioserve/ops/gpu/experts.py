# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportArgumentType=false
"""Mixtures of experts on a GPU: rows sorted by expert, one launch for the products of all experts.

A block is some rows of one expert. How many blocks an expert has is known on the device alone: a
launch has as many as there can be, and those that aren't needed end at once, so that no step waits
for the host and all of it can be in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.models.routing import ClampedSwiglu, Routing
from aioserve.ops.checks import check_tensor
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.gpu import rowwise
from aioserve.ops.reference import TorchLinear

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "ROWS",
    "SUM_TILE",
    "GpuMixture",
    "expert_kernel",
    "sum_kernel",
]

ROWS = 16
"""Rows of a block. Always as many: one instruction multiplies them, whatever their number is."""
OUTPUTS = 64
INPUTS = 64
SUM_TILE = 512


@triton.jit(do_not_specialize=["out_features", "in_features", "experts"])
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
    block_experts, block_starts, block_ends  int32 [blocks]: the block's expert, its first pair and
            the end of that expert's pairs. `experts` for a block that there isn't.
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
        out_at = out + pairs.to(tl.int64)[None, :] * out_features + outputs[:, None]
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
    """Program (row, tile of columns): the weighted parts of a row, in the order of its experts.

    parts    float32 [pairs, SIZE], sorted by expert
    places   int32 [rows, TOP_K]: where a row's parts are; -1: there is none
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


class _Stack(NamedTuple):
    """Layers of all experts as one tensor, which the layers have views of."""

    weight: Tensor
    """[experts, out, in]."""
    bias: Tensor | None
    """[experts, out]."""

    @classmethod
    def of(cls, layers: Sequence[TorchLinear]) -> _Stack:
        return cls(*TorchLinear.stacked(layers))


class GpuMixture(Mixture):
    """A row is summed in one order, by one instruction, for any number of rows."""

    def __init__(
        self,
        routing: Routing,
        ups: Sequence[TorchLinear],
        downs: Sequence[TorchLinear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> None:
        super().__init__(routing, ups, downs, gate=gate, correction=correction)
        self._up, self._down = _Stack.of(ups), _Stack.of(downs)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """As `Mixture` has it; ids that are no expert are nobody's affair here: to check them, the
        host would have to wait for them."""
        rows, top_k = routes.ids.shape
        check_tensor("x", x, self.dtype, (rows, self.hidden), x.device)
        out = torch.empty_like(x)
        if not rows:
            return out
        order, places, blocks = _sorted(routes.ids, self.routing.experts)
        up = _multiply(x, (order // top_k).int(), self._up, blocks, x.dtype)
        if isinstance(self.gate, ClampedSwiglu):
            active = rowwise.clamped_swiglu(up, self.gate)
        else:
            active = rowwise.gated(up, self.gate == "gelu_tanh")
        each = torch.arange(len(order), dtype=torch.int32, device=x.device)
        parts = _multiply(active, each, self._down, blocks, torch.float32)
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


class _Blocks(NamedTuple):
    """int32 [blocks] each, as `expert_kernel` has them."""

    experts: Tensor
    starts: Tensor
    ends: Tensor


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, _Blocks]:
    """Pairs of rows and experts sorted by expert, int64 [pairs]; the place of each pair, or -1,
    int32 [rows, top_k]; and the blocks."""
    flat = ids.flatten().long()
    keys = torch.where(flat < 0, experts, flat)
    order = keys.argsort(stable=True)
    each = torch.arange(len(flat), dtype=torch.int32, device=ids.device)
    places = torch.empty_like(each).scatter_(0, order, each)
    places.masked_fill_(flat < 0, -1)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:experts]
    ends, blocks = counts.cumsum(0), (counts + ROWS - 1) // ROWS
    last = blocks.cumsum(0)
    number = torch.arange(
        len(flat) // ROWS + min(experts, len(flat)), dtype=torch.int64, device=ids.device
    )
    expert = torch.searchsorted(last, number, right=True)
    known = expert.clamp(max=experts - 1)
    within = number - (last - blocks)[known]
    starts = (ends - counts)[known] + within * ROWS
    return order, places.view(ids.shape), _Blocks(expert.int(), starts.int(), ends[known].int())


def _multiply(
    x: Tensor, rows: Tensor, stack: _Stack, blocks: _Blocks, dtype: torch.dtype
) -> Tensor:
    """[pairs, out]: the rows of x, each with its expert's weight."""
    experts, out_features, in_features = stack.weight.shape
    # Pairs without an expert have zeros: what is made of them is finite.
    out = torch.zeros((len(rows), out_features), dtype=dtype, device=x.device)
    expert_kernel[(len(blocks.experts), triton.cdiv(out_features, OUTPUTS))](
        x,
        rows,
        stack.weight,
        stack.weight if stack.bias is None else stack.bias,
        out,
        *blocks,
        out_features,
        in_features,
        experts,
        HAS_BIAS=stack.bias is not None,
        OUTPUTS=OUTPUTS,
        ROWS=ROWS,
        INPUTS=INPUTS,
    )
    return out
