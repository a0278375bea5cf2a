# Triton compiles these functions: to it an int is a constexpr, and a launch has options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products of rows with weights of integers that have a scale for each group of inputs.

A *chunk* is a group of inputs, or 128 of them where a group has more. Integers of a chunk become
floats of x's dtype in registers, which is exact, and tensor cores multiply them; or rows of x are
integers, too. Then scales meet the sums of the chunk in float32:

    p = sum of (q - zero) * x            tensor cores, float32;  exact where x is integers
    y = fma(scale, p, y)                 and with minimums  y = fma(minimum, sum of x, y)

and where x is integers with a scale for each row and chunk, as `native/linear/grouped/tile.h` has
it for CPUs,

    t = fma(scale, p, minimum * sum of x)          scale * p without minimums
    y = fma(scale of x, t, y)

Chunks are taken in order within a *part* of the inputs, and the sums of parts are added in order. A
part depends on the layer's shape alone. Either one program takes all parts of a tile, or each part
has a program and `merge_kernel` adds them: both do the same arithmetic. Outputs are the rows of a
tile, so that the same instruction multiplies whatever the number of rows of x. So a row has the
same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["linear_kernel", "merge_kernel", "quantize_kernel", "rows_kernel", "sums_kernel"]

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: added and taken away, it rounds to the nearest integer, to even between two."""
_SMALLEST = tl.constexpr(2.0**-119)
"""Its reciprocal is finite."""


@triton.jit
def _values(at, here, BITS: tl.constexpr):
    """Values of a chunk as they are stored: uint8 of 4 bits, int8 of 8 bits. [OUTPUTS, CHUNK]"""
    found = tl.load(at, mask=here[:, None], other=0)
    if BITS == 4:
        found = tl.interleave(found & 15, found >> 4)
    return found


@triton.jit
def _of_chunk(at, here):
    return tl.load(at, mask=here, other=0).to(tl.float32)


@triton.jit(
    do_not_specialize=["rows", "out_features", "in_features", "chunks", "part_chunks", "repeat"]
)
def linear_kernel(
    x,
    x_scales,
    x_sums,
    values,
    scales,
    zeros,
    minimums,
    bias,
    out,
    rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    chunks,
    part_chunks,
    repeat,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    INTEGERS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (OUTPUTS outputs, ROWS rows, part).

    x         [rows, in_features]; int8 [rows, chunks * CHUNK] with INTEGERS
    x_scales  float32 [rows, chunks], with INTEGERS
    x_sums    float32, or int32 with INTEGERS: [rows, chunks], where they are needed
    values    [chunks, out_features, bytes]; the value is less by OFFSET
    scales, zeros, minimums   [groups, out_features], a group being `repeat` chunks
    out       [rows, out_features]; with SPLIT float32 [parts, rows, out_features]

    WHOLE: in_features is a multiple of CHUNK.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = outputs < out_features
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    inputs = tl.arange(0, CHUNK)
    BYTES: tl.constexpr = CHUNK * BITS // 8
    part = tl.program_id(2)
    start = part * part_chunks
    stop = tl.minimum(start + part_chunks, chunks) if SPLIT else chunks
    part_stop = tl.minimum(start + part_chunks, stop)

    long_row = row.to(tl.int64)
    x_at = x + long_row[:, None] * x_stride + inputs[None, :]
    value_at = values + outputs[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    chunk_bytes = out_features.to(tl.int64) * BYTES
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    # One loop over chunks, not one in another: loads run ahead across the ends of parts.
    for chunk in tl.range(start, stop):
        group = chunk // repeat * out_features + outputs
        first = chunk * CHUNK
        if INTEGERS or WHOLE:
            mask = there[:, None]
        else:
            mask = there[:, None] & (first + inputs < in_features)[None, :]
        some = tl.load(x_at + first, mask=mask, other=0)
        q = _values(value_at + chunk * chunk_bytes, here, BITS)
        scale = _of_chunk(scales + group, here)
        if INTEGERS:
            weight = (q.to(tl.int8) - OFFSET).to(tl.int8)
            products = tl.dot(weight, tl.trans(some), out_dtype=tl.int32)
            of_row = long_row * chunks + chunk
            if HAS_ZEROS:
                zero = tl.load(zeros + group, mask=here, other=0).to(tl.int32)
                sums = tl.load(x_sums + of_row, mask=there, other=0)
                products -= zero[:, None] * sums[None, :]
            if HAS_MINIMUMS:
                sums = tl.load(x_sums + of_row, mask=there, other=0).to(tl.float32)
                least = _of_chunk(minimums + group, here)[:, None] * sums[None, :]
                term = tl.fma(products.to(tl.float32), scale[:, None], least)
            else:
                term = products.to(tl.float32) * scale[:, None]
            x_scale = tl.load(x_scales + of_row, mask=there, other=0.0)
            acc = tl.fma(term, x_scale[None, :], acc)
        else:
            exact = q.to(tl.float32)
            if HAS_ZEROS:
                exact -= _of_chunk(zeros + group, here)[:, None]
            if OFFSET:
                exact -= OFFSET
            weight = exact.to(some.dtype)
            products = tl.dot(weight, tl.trans(some), input_precision="ieee")
            acc = tl.fma(products, scale[:, None], acc)
            if HAS_MINIMUMS:
                sums = tl.load(x_sums + long_row * chunks + chunk, mask=there, other=0.0)
                acc = tl.fma(_of_chunk(minimums + group, here)[:, None], sums[None, :], acc)
        if chunk + 1 == part_stop:
            total += acc
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
            part_stop = tl.minimum(part_stop + part_chunks, stop)

    if SPLIT:
        long_row += part.to(tl.int64) * rows
    elif HAS_BIAS:
        total += _of_chunk(bias + outputs, here)[:, None]
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
        total += _of_chunk(bias + outputs, here)
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
    integers,
    scales,
    sums,
    in_features,
    x_stride,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program (row, CHUNKS chunks): int8 [rows, chunks * CHUNK], zeros behind the last input;
    scales float32 [rows, chunks] and sums of the integers, int32. Rounded as
    `native/linear/grouped/tile.h` says."""
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
    factor = tl.where(is_zero, 0.0, tl.div_rn(127.0, tl.maximum(amax, _SMALLEST)))
    scale = tl.where(is_zero, 0.0, tl.div_rn(amax, 127.0))
    scaled = tl.where(bad[:, None], 0.0, some * factor[:, None])
    rounded = ((scaled + _ROUND) - _ROUND).to(tl.int32)
    inside = (chunk < chunks)[:, None]
    tl.store(integers + row * (chunks * CHUNK) + inputs, rounded.to(tl.int8), mask=inside)
    at = row * chunks + chunk
    tl.store(scales + at, tl.where(bad, float("nan"), scale), mask=chunk < chunks)
    tl.store(sums + at, tl.sum(rounded, 1), mask=chunk < chunks)


@triton.jit(do_not_specialize=["out_features", "in_features", "repeat"])
def rows_kernel(
    ids,
    values,
    scales,
    zeros,
    minimums,
    out,
    out_features,
    in_features,
    repeat,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """Program (id, chunk): that chunk of the weight's row, out [ids, in_features]. Ids that are no
    row have that of the nearest.

    Launched with `enable_fp_fusion=False`: the product is rounded, then the sum.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.minimum(tl.maximum(tl.load(ids + place), 0), out_features - 1)
    BYTES: tl.constexpr = CHUNK * BITS // 8
    at = (chunk.to(tl.int64) * out_features + row) * BYTES
    found = tl.load(values + at + tl.arange(0, BYTES))
    if BITS == 4:
        found = tl.interleave(found & 15, found >> 4)
    exact = found.to(tl.float32) - OFFSET
    group = (chunk // repeat).to(tl.int64) * out_features + row
    if HAS_ZEROS:
        exact -= tl.load(zeros + group).to(tl.float32)
    weight = exact * tl.load(scales + group).to(tl.float32)
    if HAS_MINIMUMS:
        weight += tl.load(minimums + group).to(tl.float32)
    inputs = chunk * CHUNK + tl.arange(0, CHUNK)
    to = out + place * in_features + inputs
    tl.store(to, weight.to(out.dtype.element_ty), mask=inputs < in_features)
