# Triton compiles these functions: to it an int is a constexpr, and a launch has options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""Products of rows with weights of small numbers that have a scale for each group of inputs.

A *chunk* is a group of inputs, or 128 of them if a group has more. Integers and E4M3 of a chunk
become floats of x's dtype in registers, which is exact, and tensor cores multiply them. Rows of x
may be integers, or E4M3, too. Then scales are applied to the sums of the chunk in float32:

    p = sum of (q - zero) * x            tensor cores, float32;  exact where x is integers
    y = fma(scale, p, y)                 and with minimums  y = fma(minimum, sum of x, y)

If x is rounded, it has a scale for each row and chunk, as in `native/linear/grouped/tile.h` for
CPUs:

    t = fma(scale, p, minimum * sum of x)          scale * p without minimums
    y = fma(scale of x, t, y)

Codes of 4 bits for integers in a table become these integers, and the rest is as above. Codes for
floats in a table become the weight itself in registers, rounded to x's dtype. Tensor cores then go
on from the sums of the chunks before:

    y = y + sum of round(table[q] * scale) * x

Chunks are taken in order within a *part* of the inputs, and the sums of parts are added in order. A
part depends only on the layer's shape. Either one program takes all parts of a tile, or each part
has a program and `merge_kernel` adds them. Both do the same arithmetic. Outputs are the rows of a
tile, so the same instruction multiplies any number of rows of x. So a row has the same bits in any
batch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from aioserve.formats.weights import Code

__all__ = [
    "Layout",
    "Prepared",
    "Sizes",
    "Weight",
    "linear_kernel",
    "merge_kernel",
    "of_chunk",
    "quantize_kernel",
    "rows_kernel",
    "sums_kernel",
    "tile_sums",
]

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding and subtracting it rounds to the nearest integer, ties to even."""
_SMALLEST = tl.constexpr(2.0**-119)
"""Smallest number used as a divisor: its reciprocal is finite."""


class Prepared(NamedTuple):
    """Rows of inputs as kernels multiply them. Fields that a layer doesn't need hold `x` again."""

    x: Tensor
    """[rows, in_features]; rounded ones int8 or float8e4nv [rows, chunks * chunk]."""
    scales: Tensor
    """float32 [rows, chunks], of rounded rows."""
    sums: Tensor
    """Sums of chunks [rows, chunks], float32, or int32 of integers. Needed for minimums, and for
    rounded rows with zeros."""
    stride: int
    """Numbers from a row of `x` to the next."""


class Weight(NamedTuple):
    """Small numbers of a layer with their scales. Weights of experts have an axis for the
    experts first. Fields that a layer doesn't have hold `scales` again."""

    packed: Tensor
    """Values [chunks, out_features, bytes], from which the offset is subtracted."""
    table: Tensor
    """float32 [16], of codes "table" and "chosen"."""
    scales: Tensor
    """[groups, scale_columns]. A group is `repeat` chunks, a column `alike` outputs."""
    scale_units: Tensor
    """float32 [units, out_features], if `unit_chunks` isn't 0: scales are multiples of these. A
    unit is `unit_chunks` chunks."""
    zeros: Tensor
    """[groups, out_features]."""
    minimums: Tensor
    """[groups, out_features]."""
    minimum_units: Tensor
    """float32 [units, out_features], as for scales."""


class Sizes(NamedTuple):
    """Sizes of a layer and its parts. Kernels take them one by one. In a tuple, a number that is 1,
    or a multiple of 16, would make Triton compile a kernel anew."""

    out_features: int
    in_features: int
    chunks: int
    part_chunks: int
    repeat: int
    alike: int
    scale_columns: int


class Layout(NamedTuple):
    """Constants of a layer, for which Triton compiles kernels."""

    code: Code
    bits: int
    offset: int
    chunk: int
    unit_chunks: int
    has_zeros: bool
    has_minimums: bool
    rounds: bool
    """True if rows that are multiplied become int8, or E4M3."""
    whole: bool
    """True if in_features is a multiple of `chunk`."""


@triton.jit
def _values(at, here, ZERO: tl.constexpr, BITS: tl.constexpr):
    """Values of a chunk as they are stored. [OUTPUTS, CHUNK]"""
    found = tl.load(at, mask=here[:, None], other=ZERO)
    if BITS == 4:
        found = tl.interleave(found & 15, found >> 4)
    return found


@triton.jit
def _e4m3(codes):
    """float32 of E4M3 without NaN, by integers: not every device converts them. As a float16, the
    bits mean a number smaller by 2 ** 8."""
    wide = codes.to(tl.uint16)
    half = ((wide & 128) << 8) | ((wide & 127) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e4m3_bits(x):
    """Bits of E4M3, uint8, of float32 up to 448, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    # The least exponent of normal numbers is -6, and smaller numbers have the same spacing.
    exponent = tl.maximum((bits >> 23) & 255, 121)
    steps = tl.abs(x) * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = ((steps + _ROUND) - _ROUND).to(tl.int32)
    return (((bits >> 24) & 128) | ((exponent - 121) * 8 + rounded)).to(tl.uint8)


@triton.jit
def of_chunk(at, here):
    return tl.load(at, mask=here, other=0).to(tl.float32)


@triton.jit
def _of_group(numbers, at, units, unit_at, here, MULTIPLES: tl.constexpr):
    """Scales or minimums of a group. Multiples of units are exact in float32."""
    found = of_chunk(numbers + at, here)
    if MULTIPLES:
        found *= of_chunk(units + unit_at, here)
    return found


@triton.jit
def tile_sums(
    prepared,
    weight,
    row,
    there,
    outputs,
    here,
    start,
    stop,
    sizes,
    layout: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of the chunks from `start` to `stop` of one layer, float32 [OUTPUTS, ROWS]. Each part is
    summed separately, and the parts are added in order. `start` begins a part.

    prepared, weight, sizes, layout  `Prepared`, `Weight`, `Sizes`, `Layout`
    row      int64 [ROWS], of x; `there` marks the valid ones
    outputs  int32 [OUTPUTS]; `here` likewise
    """
    inputs = tl.arange(0, layout.chunk)
    BYTES: tl.constexpr = layout.chunk * layout.bits // 8
    x_at = prepared.x + row[:, None] * prepared.stride + inputs[None, :]
    value_at = weight.packed + outputs[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    chunk_bytes = sizes.out_features.to(tl.int64) * BYTES
    part_stop = tl.minimum(start + sizes.part_chunks, stop)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    MULTIPLES: tl.constexpr = layout.unit_chunks > 0
    ZERO: tl.constexpr = 0.0 if layout.rounds and layout.code == "e4m3" else 0
    # One loop over chunks, not nested ones: loads run ahead across the ends of parts.
    for chunk in tl.range(start, stop):
        group = chunk // sizes.repeat * sizes.out_features + outputs
        scale_at = chunk // sizes.repeat * sizes.scale_columns + outputs // sizes.alike
        unit = outputs
        if MULTIPLES:
            unit += chunk // layout.unit_chunks * sizes.out_features
        first = chunk * layout.chunk
        if layout.rounds or layout.whole:
            mask = there[:, None]
        else:
            mask = there[:, None] & (first + inputs < sizes.in_features)[None, :]
        some = tl.load(x_at + first, mask=mask, other=ZERO)
        q = _values(value_at + chunk * chunk_bytes, here, ZERO, layout.bits)
        scale = _of_group(weight.scales, scale_at, weight.scale_units, unit, here, MULTIPLES)
        of_row = row * sizes.chunks + chunk
        if layout.code == "table":
            number = (tl.load(weight.table + q.to(tl.int32)) * scale[:, None]).to(some.dtype)
            acc = tl.dot(number, tl.trans(some), acc, input_precision="ieee")
        elif layout.rounds:
            if layout.code == "e4m3":
                term = tl.dot(q, tl.trans(some)) * scale[:, None]
            else:
                number = (q.to(tl.int8) - layout.offset).to(tl.int8)
                products = tl.dot(number, tl.trans(some), out_dtype=tl.int32)
                if layout.has_zeros:
                    zero = tl.load(weight.zeros + group, mask=here, other=0).to(tl.int32)
                    sums = tl.load(prepared.sums + of_row, mask=there, other=0)
                    products -= zero[:, None] * sums[None, :]
                if layout.has_minimums:
                    sums = tl.load(prepared.sums + of_row, mask=there, other=0).to(tl.float32)
                    least = _of_group(
                        weight.minimums, group, weight.minimum_units, unit, here, MULTIPLES
                    )
                    least_sums = least[:, None] * sums[None, :]
                    term = tl.fma(products.to(tl.float32), scale[:, None], least_sums)
                else:
                    term = products.to(tl.float32) * scale[:, None]
            x_scale = tl.load(prepared.scales + of_row, mask=there, other=0.0)
            acc = tl.fma(term, x_scale[None, :], acc)
        else:
            if layout.code == "e4m3":
                exact = _e4m3(q)
            elif layout.code == "chosen":
                exact = tl.load(weight.table + q.to(tl.int32))
            else:
                exact = q.to(tl.float32)
                if layout.has_zeros:
                    exact -= of_chunk(weight.zeros + group, here)[:, None]
                if layout.offset:
                    exact -= layout.offset
            products = tl.dot(exact.to(some.dtype), tl.trans(some), input_precision="ieee")
            acc = tl.fma(products, scale[:, None], acc)
            if layout.has_minimums:
                sums = tl.load(prepared.sums + of_row, mask=there, other=0.0)
                least = _of_group(
                    weight.minimums, group, weight.minimum_units, unit, here, MULTIPLES
                )
                acc = tl.fma(least[:, None], sums[None, :], acc)
        if chunk + 1 == part_stop:
            total += acc
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
            part_stop = tl.minimum(part_stop + sizes.part_chunks, stop)
    return total


@triton.jit(do_not_specialize=["rows", *Sizes._fields])
def linear_kernel(
    prepared,
    weight,
    bias,
    out,
    rows,
    out_features,
    in_features,
    chunks,
    part_chunks,
    repeat,
    alike,
    scale_columns,
    out_stride,
    layout: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (OUTPUTS outputs, ROWS rows, part). Arguments are those of `tile_sums`.

    out       [rows, out_features]; with SPLIT float32 [parts, rows, out_features]
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = outputs < out_features
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    part = tl.program_id(2)
    start = part * part_chunks
    stop = tl.minimum(start + part_chunks, chunks) if SPLIT else chunks
    long_row = row.to(tl.int64)
    total = tile_sums(
        prepared,
        weight,
        long_row,
        there,
        outputs,
        here,
        start,
        stop,
        Sizes(out_features, in_features, chunks, part_chunks, repeat, alike, scale_columns),
        layout,
        OUTPUTS,
        ROWS,
    )
    if SPLIT:
        long_row += part.to(tl.int64) * rows
    elif HAS_BIAS:
        total += of_chunk(bias + outputs, here)[:, None]
    at = out + long_row[None, :] * out_stride + outputs[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["rows", "out_features", "parts"])
def merge_kernel(
    partials,
    bias,
    out,
    rows,
    out_features,
    out_stride,
    parts,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, TILE outputs): adds the parts in order, float32 [parts, rows, out_features]."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = outputs < out_features
    total = tl.zeros([TILE], tl.float32)
    part_size = rows.to(tl.int64) * out_features
    for part in tl.range(0, parts):
        place = part * part_size + row * out_features + outputs
        total += tl.load(partials + place, mask=here, other=0.0)
    if HAS_BIAS:
        total += of_chunk(bias + outputs, here)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["in_features", "chunks"])
def sums_kernel(x, sums, in_features, x_stride, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Program (row, CHUNKS chunks): the sum of each chunk, float32 [rows, chunks]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    inputs = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    some = tl.load(x + row * x_stride + inputs, mask=inputs < in_features, other=0.0)
    found = tl.sum(some.to(tl.float32), 1)
    tl.store(sums + row * chunks + chunk, found, mask=chunk < chunks)


@triton.jit(do_not_specialize=["in_features", "chunks"])
def quantize_kernel(
    x,
    rounded,
    scales,
    sums,
    in_features,
    x_stride,
    chunks,
    CODE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program (row, CHUNKS chunks): rounds as `native/linear/grouped/tile.h` says.

    Stores int8 [rows, chunks * CHUNK], with zeros after the last input, scales float32 [rows,
    chunks], and sums of the integers, int32. With CODE "e4m3" its bits, uint8, and no sums.
    """
    LARGEST: tl.constexpr = 448.0 if CODE == "e4m3" else 127.0
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    inputs = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    some = tl.load(x + row * x_stride + inputs, mask=inputs < in_features, other=0.0)
    some = some.to(tl.float32)
    size = tl.abs(some)
    # A NaN isn't below anything.
    bad = tl.max(tl.where(size < float("inf"), 0, 1), 1) > 0
    amax = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    is_zero = amax < _SMALLEST
    factor = tl.where(is_zero, 0.0, tl.div_rn(LARGEST, tl.maximum(amax, _SMALLEST)))
    scale = tl.where(is_zero, 0.0, tl.div_rn(amax, LARGEST))
    # An explicit fused product: a plain one would be fused with `_ROUND`, and rounded only once.
    scaled = tl.where(bad[:, None], 0.0, tl.fma(some, factor[:, None], 0.0))
    to = rounded + row * (chunks * CHUNK) + inputs
    at, inside = row * chunks + chunk, chunk < chunks
    tl.store(scales + at, tl.where(bad, float("nan"), scale), mask=inside)
    if CODE == "e4m3":
        tl.store(to, _e4m3_bits(scaled), mask=inside[:, None])
    else:
        integers = ((scaled + _ROUND) - _ROUND).to(tl.int32)
        tl.store(to, integers.to(tl.int8), mask=inside[:, None])
        tl.store(sums + at, tl.sum(integers, 1), mask=inside)


@triton.jit(
    do_not_specialize=["out_features", "in_features", "repeat", "alike", "scale_columns"],
)
def rows_kernel(
    ids,
    weight,
    out,
    out_features,
    in_features,
    repeat,
    alike,
    scale_columns,
    layout: tl.constexpr,
):
    """Program (id, chunk): that chunk of the weight's row, out [ids, in_features]. An id that is no
    row gets the nearest row.

    Launched with `enable_fp_fusion=False`: the product is rounded, then the sum.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.minimum(tl.maximum(tl.load(ids + place), 0), out_features - 1)
    BYTES: tl.constexpr = layout.chunk * layout.bits // 8
    at = (chunk.to(tl.int64) * out_features + row) * BYTES
    found = tl.load(weight.packed + at + tl.arange(0, BYTES))
    if layout.bits == 4:
        found = tl.interleave(found & 15, found >> 4)
    group = (chunk // repeat).to(tl.int64)
    scale = tl.load(weight.scales + group * scale_columns + row // alike).to(tl.float32)
    unit = row
    if layout.unit_chunks:
        unit += (chunk // layout.unit_chunks).to(tl.int64) * out_features
        scale *= tl.load(weight.scale_units + unit)
    if layout.code == "table" or layout.code == "chosen":
        exact = tl.load(weight.table + found.to(tl.int32))
    elif layout.code == "e4m3":
        exact = _e4m3(found)
    else:
        exact = found.to(tl.float32) - layout.offset
        if layout.has_zeros:
            exact -= tl.load(weight.zeros + group * out_features + row).to(tl.float32)
    number = exact * scale
    if layout.has_minimums:
        least = tl.load(weight.minimums + group * out_features + row).to(tl.float32)
        if layout.unit_chunks:
            least *= tl.load(weight.minimum_units + unit)
        number += least
    inputs = chunk * layout.chunk + tl.arange(0, layout.chunk)
    to = out + place * in_features + inputs
    tl.store(to, number.to(out.dtype.element_ty), mask=inputs < in_features)
