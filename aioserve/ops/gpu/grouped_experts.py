# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Experts of small numbers with scales in groups: one launch multiplies those of all experts.

The function that decodes weights on their way into the product is that of linear layers, and inputs
come in the same parts. So an expert's products have the bits of its layer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.ops.gpu.expert_pairs import ROWS, Pairs
from aioserve.ops.gpu.grouped_kernels import Sizes, Weight, of_chunk, tile_sums
from aioserve.ops.gpu.grouped_linear import GroupedRun, Numbers, tile_of

__all__ = ["GroupedExperts", "grouped_expert_kernel", "order_kernel"]

_ORDERED = 1024
"""Columns of a row that one program puts in order."""


@triton.jit(do_not_specialize=["experts", *Sizes._fields])
def grouped_expert_kernel(
    prepared,
    weight,
    bias,
    out,
    rows,
    block_experts,
    block_starts,
    block_ends,
    out_features,
    in_features,
    chunks,
    part_chunks,
    repeat,
    alike,
    scale_columns,
    out_stride,
    experts,
    layout: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (block, OUTPUTS outputs). Arguments are those of `tile_sums`, with the weight of all
    experts.

    rows   int32 [pairs]: of x, for each pair, sorted by expert
    bias   [experts, out_features], with HAS_BIAS
    out    [pairs, out_features]
    block_experts, block_starts, block_ends  `Blocks`
    """
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < experts:
        pairs = tl.load(block_starts + block) + tl.arange(0, ROWS)
        there = pairs < tl.load(block_ends + block)
        row = tl.load(rows + pairs, mask=there, other=0).to(tl.int64)
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        here = outputs < out_features
        BYTES: tl.constexpr = layout.chunk * layout.bits // 8
        group = expert * tl.cdiv(chunks, repeat)
        unit = expert * out_features
        if layout.unit_chunks:
            unit *= tl.cdiv(chunks, layout.unit_chunks)
        of_expert = Weight(
            weight.packed + expert * chunks * out_features * BYTES,
            weight.table + expert * 16,
            weight.scales + group * scale_columns,
            weight.scale_units + unit,
            weight.zeros + group * out_features,
            weight.minimums + group * out_features,
            weight.minimum_units + unit,
        )
        total = tile_sums(
            prepared,
            of_expert,
            row,
            there,
            outputs,
            here,
            0,
            chunks,
            Sizes(out_features, in_features, chunks, part_chunks, repeat, alike, scale_columns),
            layout,
            OUTPUTS,
            ROWS,
        )
        if HAS_BIAS:
            total += of_chunk(bias + expert * out_features + outputs, here)[:, None]
        at = out + pairs.to(tl.int64)[None, :] * out_stride + outputs[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["in_features", "count"])
def order_kernel(x, rows, experts, order, out, in_features, x_stride, count, TILE: tl.constexpr):
    """Program (pair, TILE columns): the inputs of a pair's row in the order of its expert.

    rows     int32 [pairs], of x
    experts  int64 [pairs]; nothing is written for experts from `count` on
    order    int32 [count, in_features]
    out      [pairs, in_features]
    """
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + pair)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (columns < in_features) & (expert < count)
    row = tl.load(rows + pair).to(tl.int64)
    inputs = tl.load(order + expert * in_features + columns, mask=inside, other=0)
    some = tl.load(x + row * x_stride + inputs, mask=inside, other=0.0)
    tl.store(out + pair * in_features + columns, some, mask=inside)


class GroupedExperts:
    """A run of the layers of all experts, which must be alike. The runs keep views of the tensors
    here, so nothing is stored twice."""

    def __init__(self, runs: Sequence[GroupedRun]) -> None:
        self._run = runs[0]
        self._experts = len(runs)
        self._numbers = Numbers(*map(_together, zip(*(run.numbers for run in runs), strict=True)))
        for i, run in enumerate(runs):
            run.numbers = Numbers(*(None if one is None else one[i] for one in self._numbers))

    @property
    def out_features(self) -> int:
        return self._run.out_features

    def multiply(self, x: Tensor, pairs: Pairs, out: Tensor) -> None:
        """Fill out [pairs, out_features], whose rows may lie apart, for pairs with an expert."""
        run, numbers, rows = self._run, self._numbers, pairs.rows
        if numbers.order is not None:
            x = self._in_order(x, pairs, numbers.order)
            rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
        tile = tile_of(ROWS, x.dtype)
        prepared = run.prepared(x)
        grid = len(pairs.blocks.experts), triton.cdiv(run.out_features, tile.outputs)
        grouped_expert_kernel[grid](
            prepared,
            numbers.weight_for(prepared.x),
            prepared.x if numbers.bias is None else numbers.bias,
            out,
            rows,
            *pairs.blocks,
            *run.sizes,
            out.stride(0),
            self._experts,
            run.layout,
            HAS_BIAS=numbers.bias is not None,
            OUTPUTS=tile.outputs,
            ROWS=ROWS,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _in_order(self, x: Tensor, pairs: Pairs, order: Tensor) -> Tensor:
        """Rows of all pairs, each in the order of its expert's columns."""
        count, size = len(pairs.rows), self._run.sizes.in_features
        out = torch.empty((count, size), dtype=x.dtype, device=x.device)
        order_kernel[count, triton.cdiv(size, _ORDERED)](
            x,
            pairs.rows,
            pairs.experts,
            order,
            out,
            size,
            x.stride(0),
            self._experts,
            TILE=_ORDERED,
            num_warps=4,
        )
        return out


def _together(numbers: Sequence[Tensor | None]) -> Tensor | None:
    """Stack tensors along an axis for the experts. They become float32 if dtypes differ, since only
    some scales fit two bytes, or fit different formats."""
    found = [one for one in numbers if one is not None]
    if not found:
        return None
    if len({one.dtype for one in found}) > 1:
        found = [one.float() for one in found]
    return torch.stack(found)
