# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
"""Norms and rotation of query and key heads, and the write of keys and values into their pages.

One launch. Each head is computed separately, in float32, and rounded once. Callers have checked the
arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aioserve.ops.checks import HeadNorms, Rotation
from aioserve.ops.gpu.gpu_batch import GpuKVLayer

__all__ = ["rotary_kernel", "rotary_kv_write"]

HEADS = 8
"""Heads of a token per program."""


@triton.jit
def _store(at, rows, result, dims, mask):
    tl.store(at + rows[:, None] + dims[None, :], result.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _place(qkv, k_pages, v_pages, q_at, kv_at, is_query, is_key, is_value, result, dims, inside):
    """Store some dims of the heads: queries in place, keys and values in their page."""
    _store(qkv, q_at, result, dims, is_query[:, None] & inside)
    _store(k_pages, kv_at, result, dims, is_key[:, None] & inside)
    _store(v_pages, kv_at, result, dims, is_value[:, None] & inside)


@triton.jit
def _broken(at, rows, dims, mask):
    """1 for heads with a NaN or an infinity where `mask` [HEADS, dims] is set, float32 [HEADS]"""
    numbers = tl.load(at + rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.max(tl.where(tl.abs(numbers) < float("inf"), 0.0, 1.0), 1)


@triton.jit
def _factors(query_norm, key_norm, is_query, dims, inside, weight_offset):
    q = tl.load(query_norm + dims, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key_norm + dims, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :]) + weight_offset


@triton.jit
def rotary_kernel(
    qkv,
    positions,
    locations,
    k_pages,
    v_pages,
    cos,
    sin,
    query_scale,
    query_norm,
    key_norm,
    row_stride,
    page_stride,
    eps,
    weight_offset,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    SCALED: tl.constexpr,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):
    """Program (token, HEADS of its heads): queries first, then keys, then values.

    HALF pairs of dims are rotated, dim i * STEP with i * STEP + APART; the dims after them are the
    rest. The program that writes a dim reads it. Values don't change, so the program that writes
    their key reads them as well.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < Q_HEADS
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_value = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    here = head < Q_HEADS + 2 * KV_HEADS
    kv_head = tl.where(is_key, head - Q_HEADS, head - Q_HEADS - KV_HEADS)

    q_at = token * row_stride + head * HEAD_DIM
    location = tl.load(locations + token)
    page = location // PAGE_SIZE
    offset = location - page * PAGE_SIZE
    kv_at = page * page_stride + (kv_head * PAGE_SIZE + offset) * HEAD_DIM

    if HALF > 0:
        pair = tl.arange(0, HALF_TILE)
        dims = pair * STEP
        paired = here[:, None] & (pair < HALF)[None, :]
        at = qkv + q_at[:, None] + dims[None, :]
        first = tl.load(at, mask=paired, other=0.0).to(tl.float32)
        second = tl.load(at + APART, mask=paired, other=0.0).to(tl.float32)
    if REST_TILE > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_TILE)
        in_rest = here[:, None] & (rest_dims < HEAD_DIM)[None, :]
        rest = tl.load(qkv + q_at[:, None] + rest_dims[None, :], mask=in_rest, other=0.0)
        rest = rest.to(tl.float32)
    # Attention multiplies unseen values by 0, and NaN times 0 is NaN. So a bad value is written as
    # zeros, and its key as NaN: only the rows that see it get NaN.
    value_at = tl.where(is_key, q_at + KV_HEADS * HEAD_DIM, q_at)
    kept = (is_key | is_value)[:, None]
    broken = tl.zeros([HEADS], tl.float32)
    if HALF > 0:
        broken += _broken(qkv, value_at, dims, kept & (pair < HALF)[None, :])
        broken += _broken(qkv, value_at + APART, dims, kept & (pair < HALF)[None, :])
    if REST_TILE > 0:
        broken += _broken(qkv, value_at, rest_dims, kept & (rest_dims < HEAD_DIM)[None, :])
    broken = (broken > 0.0)[:, None]
    instead = tl.where(is_value, 0.0, float("nan"))[:, None]
    # Everything is read before anything is written, by any thread.
    tl.debug_barrier()

    if NORMS:
        squares = tl.zeros([HEADS], tl.float32)
        if HALF > 0:
            squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_TILE > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        plain = is_value[:, None]
    if HALF > 0:
        if NORMS:
            in_pair = pair < HALF
            low = _factors(query_norm, key_norm, is_query, dims, in_pair, weight_offset)
            high = _factors(query_norm, key_norm, is_query, dims + APART, in_pair, weight_offset)
            first = tl.where(plain, first, first * scale * low)
            second = tl.where(plain, second, second * scale * high)
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        turned = tl.where(is_value[:, None], first, first * c - second * s)
        second = tl.where(is_value[:, None], second, second * c + first * s)
        if SCALED:
            factor = tl.where(is_query, tl.load(query_scale + position), 1.0)[:, None]
            turned *= factor
            second *= factor
        turned = tl.where(broken, instead, turned)
        second = tl.where(broken, instead, second)
        _place(qkv, k_pages, v_pages, q_at, kv_at, is_query, is_key, is_value, turned, dims, paired)
        _place(
            qkv, k_pages, v_pages, q_at + APART, kv_at + APART, is_query, is_key, is_value,
            second, dims, paired,
        )  # fmt: skip
    if REST_TILE > 0:
        if NORMS:
            held = rest_dims < HEAD_DIM
            factors = _factors(query_norm, key_norm, is_query, rest_dims, held, weight_offset)
            rest = tl.where(plain, rest, rest * scale * factors)
        if SCALED:
            at_position = tl.load(positions + token).to(tl.int64)
            rest *= tl.where(is_query, tl.load(query_scale + at_position), 1.0)[:, None]
        rest = tl.where(broken, instead, rest)
        _place(
            qkv, k_pages, v_pages, q_at, kv_at, is_query, is_key, is_value, rest, rest_dims, in_rest
        )


def rotary_kv_write(
    qkv: Tensor,
    at: GpuKVLayer,
    q_heads: int,
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> None:
    batch, kv, layer = at
    tokens, head_dim = qkv.shape[0], kv.head_dim
    if not tokens:
        return
    half = 0 if rotation is None else rotation.cos.shape[1]
    rest = head_dim - 2 * half
    k_pages, v_pages = kv.layer(layer)
    # Values that a kernel is compiled not to read may be anything.
    cos, sin = (qkv, qkv) if rotation is None else rotation[:2]
    query_scale = None if rotation is None else rotation.query_scale
    interleaved = rotation is not None and rotation.interleaved
    rotary_kernel[(tokens, -(-(q_heads + 2 * kv.num_kv_heads) // HEADS))](
        qkv,
        batch.positions,
        batch.token_locations[at.group],
        k_pages,
        v_pages,
        cos,
        sin,
        qkv if query_scale is None else query_scale,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        qkv.stride(0),
        kv.page_stride,
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.weight_offset,
        Q_HEADS=q_heads,
        KV_HEADS=kv.num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=kv.page_size,
        HALF=half,
        STEP=2 if interleaved else 1,
        APART=1 if interleaved else half,
        SCALED=query_scale is not None,
        NORMS=norms is not None,
        HEADS=HEADS,
        HALF_TILE=1 << (half - 1).bit_length() if half else 0,
        REST_TILE=1 << (rest - 1).bit_length() if rest else 0,
        num_warps=4,
    )
