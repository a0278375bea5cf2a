# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Races: find the token of a row with the least score, in the noise of `aioserve.ops.philox`.

A score is `log(E) + (largest - x) / temperature` in float64, with the token's exponential E. Few
tokens need one: a bound from 24 bits of their noise, in float32, rules the others out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aioserve.ops.gpu.selection import inverse, ordered

__all__ = ["exponential", "finish", "race_kernel", "win_kernel"]


@triton.jit
def _philox(seed, position, calls, half):
    """Four words, uint32, of each of `calls`, uint32. `seed` and `position` are int64 that hold the
    bits of a uint64."""
    first = tl.full([], 0xD2511F53, tl.uint32)
    second = tl.full([], 0xCD9E8D57, tl.uint32)
    position = position.to(tl.uint64, bitcast=True)
    seed = seed.to(tl.uint64, bitcast=True)
    c0 = position.to(tl.uint32) | (calls & 0)
    c1 = (position >> 32).to(tl.uint32) | (calls & 0)
    c2 = calls
    c3 = half | (calls & 0)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        upper0 = tl.umulhi(c0, first)
        upper1 = tl.umulhi(c2, second)
        lower0 = c0 * first
        lower1 = c2 * second
        c0 = upper1 ^ c1 ^ k0
        c1 = lower1
        c2 = upper0 ^ c3 ^ k1
        c3 = lower0
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _word(seed, position, token, half):
    """One word of the token, uint64."""
    call = (token // 64 * 16 + token % 16).to(tl.uint32)
    w0, w1, w2, w3 = _philox(seed, position, call, half)
    own = token // 16 % 4
    word = tl.where(own == 0, w0, tl.where(own == 1, w1, tl.where(own == 2, w2, w3)))
    return word.to(tl.uint64)


@triton.jit
def exponential(seed, position, token):
    """Exponential of a token id, int32, as in `aioserve.ops.philox.exponentials` up to rounding:
    float64."""
    upper = _word(seed, position, token, tl.full([], 1, tl.uint32))
    bits = (upper << 32) | _word(seed, position, token, tl.full([], 2, tl.uint32))
    late = (bits >> 63) != 0
    # Near either end of the unit interval the distance is exact to the last bit.
    near = tl.where(late, bits ^ 0xFFFFFFFFFFFFFFFF, bits).to(tl.int64)
    distance = (near.to(tl.float64) + 0.5) * 5.421010862427522e-20
    # -log(1 - distance), corrected for the rounding of the difference.
    whole = 1.0 - distance
    lost = 1.0 - whole
    early = -tl.log(whole) * (distance / tl.where(lost > 0, lost, 1.0))
    return tl.where(late, -tl.log(distance), tl.where(lost > 0, early, distance))


@triton.jit
def finish(tokens, statuses, last_tokens, slots, row, token, status):
    """Store the row's token and its status."""
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(statuses + row, status)
    tl.store(last_tokens + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def race_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    largests,
    kinds,
    orders,
    last_ids,
    scores,
    winners,
    stride,
    VOCAB: tl.constexpr,
    CALLS: tl.constexpr,
):
    """Program (row, block of 4 CALLS ids): the least score among its kept tokens, and the lowest id
    with it. Infinity if none can have the least score of the row."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    if kind == 0:
        return
    block = tl.program_id(1)
    wide = row.to(tl.int64)
    logits += wide * stride
    calls = block * CALLS + tl.arange(0, CALLS)
    # Word j of call 16 b + l belongs to token 64 b + 16 j + l.
    ids = (calls // 16 * 64 + calls % 16)[:, None] + 16 * tl.arange(0, 4)[None, :]
    x = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
    if kind == 2:
        order = tl.load(orders + row)
        ranks = ordered(x)
        kept = (ranks > order) | ((ranks == order) & (ids <= tl.load(last_ids + row)))
        x = tl.where(kept, x, float("-inf"))

    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    half = tl.full([], 1, tl.uint32)
    w0, w1, w2, w3 = _philox(seed, position, calls.to(tl.uint32), half)
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    words = tl.reshape(tl.permute(pairs, (0, 2, 1)), [CALLS, 4])

    # -log(1 - u) is at least u, and u is at least what its upper bits say.
    uniform = (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    largest = tl.load(largests + row)
    temperature = tl.load(temperatures + row)
    gap = tl.minimum((largest - x) * inverse(temperature) * 1.4426950408889634, 127.0)
    least = tl.where(x > float("-inf"), tl.log2(uniform) + gap, float("inf"))
    # The largest logit's own score is less than 6.
    limit = tl.full([], 6.0, tl.float32)
    best = tl.full([], float("inf"), tl.float64)
    winner = tl.full([], 0x7FFFFFFF, tl.int32)
    low = tl.min(tl.min(least, 1), 0)
    while low <= limit:
        token = tl.min(tl.min(tl.where(least == low, ids, 0x7FFFFFFF), 1), 0)
        behind = largest.to(tl.float64) - tl.load(logits + token).to(tl.float64)
        score = tl.log(exponential(seed, position, token)) + behind / temperature
        wins = (score < best) | ((score == best) & (token < winner))
        winner = tl.where(wins, token, winner)
        best = tl.where(wins, score, best)
        # Far more than the rounding of bounds.
        limit = tl.minimum(limit, (best * 1.4426950408889634).to(tl.float32) + 0.001)
        least = tl.where(ids == token, float("inf"), least)
        low = tl.min(tl.min(least, 1), 0)
    at = wide * tl.num_programs(1) + block
    tl.store(scores + at, best)
    tl.store(winners + at, winner)


@triton.jit
def win_kernel(
    scores,
    winners,
    kinds,
    slots,
    last_tokens,
    tokens,
    statuses,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
):
    """Program (row): the winner of its blocks' winners."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(kinds + row) == 0:
        return
    blocks = tl.arange(0, BLOCKS_TILE)
    inside = blocks < BLOCKS
    of_blocks = tl.load(scores + row * BLOCKS + blocks, mask=inside, other=float("inf"))
    ids = tl.load(winners + row * BLOCKS + blocks, mask=inside, other=0x7FFFFFFF)
    best = tl.min(of_blocks, 0)
    token = tl.min(tl.where(of_blocks == best, ids, 0x7FFFFFFF), 0)
    finish(tokens, statuses, last_tokens, slots, row, token, 0)
