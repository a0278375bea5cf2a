# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Weights of logits as whole numbers, and the search for the entry at which a sum is reached.

A weight is `2**40 * exp((x - largest) / temperature)`, rounded down. Sums of whole numbers are
exact, so they are the same in any order and for any cut into tiles. Weights below 2**-40 of the
largest become 0. For 2**18 entries that loses at most 2**-22 of the whole, as much as the rounding
of float32 weights.

Entries are ranked by the bits of their logit, brought into order. A search narrows the range of
these bits, to a 16th each time. Nothing is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "MAX_VOCAB",
    "inverse",
    "nth_equal",
    "ordered",
    "select",
    "sums_above",
    "value_of",
    "weights",
]

MAX_VOCAB = 1 << 22
"""Largest vocabulary: that many weights of 2**40 add up to less than 2**63."""


@triton.jit
def inverse(temperature):
    """float32 1 / temperature, of a float64: positive and finite."""
    return tl.minimum(tl.maximum(1.0 / temperature, 1e-37), 3.4e38).to(tl.float32)


@triton.jit
def weights(x, largest, inverse_temperature):
    """int64, at most 2**40. The largest must be finite."""
    return (tl.exp((x - largest) * inverse_temperature) * 1099511627776.0).to(tl.int64)


@triton.jit
def ordered(x):
    """int64 that grows with x, float32; one number for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def value_of(order):
    """Inverse of `ordered`: the float32 x with `ordered(x) == order`."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _entries(row, listed, from_list, start, count, TILE: tl.constexpr):
    """Logits [TILE] of a row, or of a list made from it, and a mask of the existing ones."""
    at = start + tl.arange(0, TILE)
    inside = at < count
    in_list = at < tl.where(from_list != 0, count, 0)
    in_row = at < tl.where(from_list != 0, 0, count)
    of_list = tl.load(listed + at, mask=in_list, other=float("-inf"))
    of_row = tl.load(row + at, mask=in_row, other=float("-inf"))
    return tl.where(from_list != 0, of_list, of_row), inside


@triton.jit
def select(
    row,
    listed,
    from_list,
    count,
    goal,
    low,
    largest,
    inverse_temperature,
    BY_COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Highest v such that the entries with `ordered(x) >= v` reach the goal, int64.

    They reach it by their weights or, with BY_COUNT, by their number. Entries at `low` or above
    must reach it; otherwise v is `low`.
    """
    high = ordered(largest)
    while low < high:
        step = (high - low) // 16 + 1
        pivots = low + step * tl.arange(0, 16)
        reached = tl.zeros([16], tl.int64)
        for start in range(0, count, TILE):
            x, inside = _entries(row, listed, from_list, start, count, TILE)
            if BY_COUNT:
                measure = tl.where(inside, 1, 0).to(tl.int64)
            else:
                measure = tl.where(inside, weights(x, largest, inverse_temperature), 0)
            above = ordered(x)[:, None] >= pivots[None, :]
            reached += tl.sum(tl.where(above, measure[:, None], 0), 0)
        passed = tl.sum((reached >= goal).to(tl.int32), 0)
        low += step * tl.maximum(passed - 1, 0)
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def sums_above(
    row, listed, from_list, count, order, largest, inverse_temperature, TILE: tl.constexpr
):
    """Number and weight of the entries ranked above `order`, then the weight of one entry at it and
    the number of those."""
    number = tl.full([], 0, tl.int64)
    mass = tl.full([], 0, tl.int64)
    weight = tl.full([], 0, tl.int64)
    equals = tl.full([], 0, tl.int64)
    for start in range(0, count, TILE):
        x, inside = _entries(row, listed, from_list, start, count, TILE)
        each = tl.where(inside, weights(x, largest, inverse_temperature), 0)
        ranks = ordered(x)
        above = inside & (ranks > order)
        equal = inside & (ranks == order)
        number += tl.sum(above.to(tl.int64), 0)
        mass += tl.sum(tl.where(above, each, 0), 0)
        weight = tl.maximum(weight, tl.max(tl.where(equal, each, 0), 0))
        equals += tl.sum(equal.to(tl.int64), 0)
    return number, mass, weight, equals


@triton.jit
def _entry_ids(ids, from_list, start, count, TILE: tl.constexpr):
    at = start + tl.arange(0, TILE)
    of_list = tl.load(ids + at, mask=at < tl.where(from_list != 0, count, 0), other=0)
    return tl.where(from_list != 0, of_list, at)


@triton.jit
def nth_equal(
    row, listed, ids, from_list, count, order, nth, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Id at `order` that `nth` lower ids of the entries at `order` come before. The ids of a list
    are in `ids`; a row's are its columns."""
    low = tl.full([], 0, tl.int32)
    # One more than the last id: Triton 3.6 can't compile a loop that never begins.
    high = tl.full([], VOCAB, tl.int32)
    while low < high:
        step = (high - low) // 16 + 1
        # Entries up to the end of each part of the range.
        ends = low + step * (tl.arange(0, 16) + 1) - 1
        up_to = tl.zeros([16], tl.int64)
        for start in range(0, count, TILE):
            x, inside = _entries(row, listed, from_list, start, count, TILE)
            equal = inside & (ordered(x) == order)
            entry_ids = _entry_ids(ids, from_list, start, count, TILE)
            before = equal[:, None] & (entry_ids[:, None] <= ends[None, :])
            up_to += tl.sum(before.to(tl.int64), 0)
        passed = tl.sum((up_to <= nth).to(tl.int32), 0)
        low = tl.minimum(low + step * passed, high)
        high = tl.minimum(high, low + step - 1)
    return low
