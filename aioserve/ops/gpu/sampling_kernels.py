# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Kernels of `sampling` before the race, in the order of their launches.

Rows are cut into blocks: COLS columns of the row as a matrix of LINES lines. Each column goes WIDTH
ids further from line to line. Weights and searches are those of `selection`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aioserve.ops.gpu.race import finish
from aioserve.ops.gpu.selection import (
    inverse,
    nth_equal,
    ordered,
    select,
    sums_above,
    value_of,
    weights,
)

__all__ = [
    "border_kernel",
    "first_kernel",
    "gather_kernel",
    "reduce_kernel",
    "weigh_kernel",
]


@triton.jit
def _tile(logits, row, stride, block, VOCAB: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr):
    """A block of a row: logits [LINES, COLS], -inf where there are none, and their ids."""
    WIDTH: tl.constexpr = (VOCAB + LINES - 1) // LINES
    column = block * COLS + tl.arange(0, COLS)[None, :]
    ids = tl.arange(0, LINES)[:, None] * WIDTH + column
    inside = (column < WIDTH) & (ids < VOCAB)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    return x, ids


@triton.jit
def reduce_kernel(
    logits,
    block_largest,
    block_ids,
    group_largest,
    stride,
    VOCAB: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Program (row, block): its largest logit, NaN if there is one, and the lowest id of it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    x, ids = _tile(logits, row, stride, block, VOCAB, LINES, COLS)
    is_nan = x != x
    nans = tl.sum(tl.sum(tl.where(is_nan, 1.0, 0.0), 1), 0)
    x = tl.where(is_nan, float("-inf"), x)
    columns = tl.max(x, 0)
    largest = tl.max(columns, 0)
    equal = tl.where(x == largest, ids, 0x7FFFFFFF)
    lowest = tl.min(tl.min(equal, 1), 0)
    at = row.to(tl.int64) * tl.num_programs(1) + block
    tl.store(block_largest + at, tl.where(nans > 0, float("nan"), largest))
    tl.store(block_ids + at, lowest)
    groups = tl.max(tl.reshape(columns, [GROUPS, COLS // GROUPS]), 1)
    tl.store(group_largest + at * GROUPS + tl.arange(0, GROUPS), groups)


@triton.jit
def first_kernel(
    block_largest,
    block_ids,
    group_largest,
    temperatures,
    top_ks,
    top_ps,
    slots,
    last_tokens,
    tokens,
    statuses,
    largests,
    floors,
    kinds,
    counts,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """Program (row): finishes greedy rows and those that fail.

    For the others it stores the largest logit, a floor below which `top_k` keeps nothing, and the
    kind. This is 1 if every token may be drawn, 2 if `top_k` or `top_p` leaves some out.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS_TILE)
    inside = blocks < BLOCKS
    parts = tl.load(block_largest + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
    part_ids = tl.load(block_ids + row * BLOCKS + blocks, mask=inside, other=0x7FFFFFFF)
    is_nan = parts != parts
    nans = tl.sum(tl.where(is_nan, 1.0, 0.0), 0)
    parts = tl.where(is_nan, float("-inf"), parts)
    largest = tl.max(parts, 0)
    token = tl.min(tl.where(parts == largest, part_ids, 0x7FFFFFFF), 0)
    status = tl.where(largest == float("-inf"), 3, 0)
    status = tl.where(largest == float("inf"), 2, status)
    status = tl.where(nans > 0, 1, status)

    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    by_count = (top_k > 0) & (top_k < VOCAB)
    kind = tl.where(by_count | (top_p < 1.0), 2, 1)
    kind = tl.where((status == 0) & (temperature > 0.0), kind, 0)
    tl.store(largests + row, largest)
    tl.store(kinds + row, kind)
    tl.store(counts + row, 0)
    if kind == 0:
        finish(tokens, statuses, last_tokens, slots, row, tl.where(status == 0, token, 0), status)
        return
    tl.store(statuses + row, 0)
    if by_count:
        lowest = ordered(tl.full([], float("-inf"), tl.float32))
        floor = lowest
        # Each of `top_k` groups has an entry that is at least the smallest of their largest.
        if top_k <= BLOCKS * GROUPS:
            groups = group_largest + row * (BLOCKS * GROUPS)
            no_list = tl.full([], 0, tl.int32)
            number = tl.full([], BLOCKS * GROUPS, tl.int32)
            floor = select(
                groups, groups, no_list, number, top_k, lowest, largest, largest, True, SEARCHED
            )
        tl.store(floors + row, value_of(floor))


@triton.jit
def weigh_kernel(
    logits,
    temperatures,
    top_ks,
    largests,
    kinds,
    masses,
    stride,
    VOCAB: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Program (row, block): weights of its entries, from each level on, if `top_p` cuts a whole
    row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    top_k = tl.load(top_ks + row)
    if (tl.load(kinds + row) != 2) | ((top_k > 0) & (top_k < VOCAB)):
        return
    x, _ = _tile(logits, row, stride, block, VOCAB, LINES, COLS)
    each = weights(x, tl.load(largests + row), inverse(tl.load(temperatures + row)))
    at = masses + (row.to(tl.int64) * tl.num_programs(1) + block) * LEVELS
    tl.store(at, tl.sum(tl.sum(each, 0), 0))
    for level in tl.static_range(1, LEVELS):
        heavy = tl.where(each >= (1 << (40 - 2 * level)), each, 0)
        tl.store(at + level, tl.sum(tl.sum(heavy, 0), 0))


@triton.jit
def _ceiling(share, total):
    """int64: share * total rounded up, from 1 to total."""
    exact = share * total.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += tl.where(whole.to(tl.float64) < exact, 1, 0)
    return tl.minimum(tl.maximum(whole, 1), total)


@triton.jit
def gather_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    largests,
    floors,
    kinds,
    masses,
    totals,
    counts,
    listed,
    listed_ids,
    stride,
    VOCAB: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Program (row, block): append its entries that may be kept to the row's list, in any order."""
    row = tl.program_id(0)
    if tl.load(kinds + row) != 2:
        return
    x, ids = _tile(logits, row, stride, tl.program_id(1), VOCAB, LINES, COLS)
    wide = row.to(tl.int64)
    top_k = tl.load(top_ks + row)
    each = weights(x, tl.load(largests + row), inverse(tl.load(temperatures + row)))
    if (top_k > 0) & (top_k < VOCAB):
        kept = (x >= tl.load(floors + row)) & (x > float("-inf"))
    else:
        blocks = tl.arange(0, BLOCKS_TILE)[:, None]
        levels = tl.arange(0, LEVELS)
        at = masses + (wide * BLOCKS + blocks) * LEVELS + levels[None, :]
        level_masses = tl.sum(tl.load(at, mask=blocks < BLOCKS, other=0), 0)
        total = tl.sum(tl.where(levels == 0, level_masses, 0), 0)
        tl.store(totals + row, total)
        # The heaviest level that reaches the nucleus holds all of it.
        reached = level_masses >= _ceiling(tl.load(top_ps + row), total)
        least = tl.full([LEVELS], 1, tl.int64) << (40 - 2 * levels).to(tl.int64)
        least = tl.where(reached & (levels > 0), least, 1)
        kept = each >= tl.max(least, 0)
    flat = tl.reshape(kept.to(tl.int32), [LINES * COLS])
    number = tl.sum(flat, 0)
    if number > 0:
        first = tl.atomic_add(counts + row, number)
        place = first + tl.cumsum(flat, 0) - 1
        mask = (flat > 0) & (place < LISTED)
        at = wide * LISTED + place
        tl.store(listed + at, tl.reshape(x, [LINES * COLS]), mask=mask)
        tl.store(listed_ids + at, tl.reshape(ids, [LINES * COLS]), mask=mask)


@triton.jit
def border_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    largests,
    floors,
    kinds,
    totals,
    counts,
    listed,
    listed_ids,
    orders,
    last_ids,
    stride,
    VOCAB: tl.constexpr,
    LISTED: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """Program (row) that leaves some tokens out: the order of the last kept token, and the highest
    kept id among those of this order."""
    row = tl.program_id(0)
    if tl.load(kinds + row) != 2:
        return
    wide = row.to(tl.int64)
    count = tl.load(counts + row)
    from_list = (count <= LISTED).to(tl.int32)
    count = tl.where(from_list != 0, count, VOCAB)
    logits += wide * stride
    listed += wide * LISTED
    listed_ids += wide * LISTED
    largest = tl.load(largests + row)
    by = inverse(tl.load(temperatures + row))
    low = ordered(tl.full([], float("-inf"), tl.float32))

    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (top_k < VOCAB):
        if from_list != 0:
            low = ordered(tl.load(floors + row))
        # A list has no -inf, which top_k may reach down to: they weigh nothing.
        goal = tl.minimum(top_k, count.to(tl.int64))
        low = select(logits, listed, from_list, count, goal, low, largest, by, True, SEARCHED)
        number, mass, weight, equals = sums_above(
            logits, listed, from_list, count, low, largest, by, SEARCHED
        )
        kept_equals = goal - number
    else:
        _, mass, weight, equals = sums_above(
            logits, listed, from_list, count, low, largest, by, SEARCHED
        )
        kept_equals = equals
    kept = mass + kept_equals * weight
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        total = kept
        if (top_k <= 0) | (top_k >= VOCAB):
            total = tl.load(totals + row)
        goal = tl.minimum(_ceiling(top_p, total), kept)
        low = select(logits, listed, from_list, count, goal, low, largest, by, False, SEARCHED)
        _, mass, weight, equals = sums_above(
            logits, listed, from_list, count, low, largest, by, SEARCHED
        )
        # As many of equals as it takes.
        weight = tl.maximum(weight, 1)
        kept_equals = (goal - mass + weight - 1) // weight

    last = tl.full([], VOCAB, tl.int32)
    if kept_equals < equals:
        last = nth_equal(
            logits, listed, listed_ids, from_list, count, low, kept_equals - 1, VOCAB, SEARCHED
        )
    tl.store(orders + row, low)
    tl.store(last_ids + row, last)
