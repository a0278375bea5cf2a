# Triton compiles these functions: to it an int is a constexpr, and a launch has options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Latent attention: writes of latent pages, and attention over them.

All query heads of some tokens are the rows of a tile. One read of a token's row serves them as key,
and its beginning as value. The same code in the same tiles computes decodes and prompts. Tiles of
keys begin at multiples of their size. So a row has the same bits in any chunk and any batch.
Several programs never share a decode's context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.ops.backend import AttentionKind
from aioserve.ops.checks import RMSNorm, Rotation
from aioserve.ops.gpu.attention_core import finish, fold, log_sum_exp, score_units
from aioserve.ops.gpu.attention_tiles import padded_dims
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK, GpuKVLayer

__all__ = [
    "attention_kernel",
    "latent_attention",
    "latent_tile",
    "latent_write",
    "write_kernel",
]


class LatentTile(NamedTuple):
    rows: int
    """Query heads, of one token or several."""
    keys: int
    warps: int
    stages: int


def latent_tile(dtype: torch.dtype, target: int) -> LatentTile:
    """Tile of one program on a device of compute capability `target`: 80 for 8.0."""
    if dtype.itemsize == 4:
        return LatentTile(16, 16, 4, 1)
    return LatentTile(64 if target >= 90 else 32, 32, 8, 2)


@triton.jit
def write_kernel(
    queries,
    latents,
    positions,
    locations,
    pages,
    weight,
    cos,
    sin,
    query_stride,
    latent_stride,
    page_stride,
    eps,
    weight_offset,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):
    """Program (token, HEAD_TILE of its query heads): rotates these. The first one also writes the
    token's row of the page. HALF pairs are rotated, i * STEP with i * STEP + APART."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    pair = tl.arange(0, HALF_TILE)
    paired = pair < HALF
    c = tl.load(cos + position * HALF + pair, mask=paired, other=0.0)
    s = tl.load(sin + position * HALF + pair, mask=paired, other=0.0)

    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    at = token * query_stride + head * (RANK + ROTATED) + RANK
    pairs = queries + at[:, None] + (pair * STEP)[None, :]
    here = (head < HEADS)[:, None] & paired[None, :]
    first = tl.load(pairs, mask=here, other=0.0).to(tl.float32)
    second = tl.load(pairs + APART, mask=here, other=0.0).to(tl.float32)
    # Everything is read before anything is written, by any thread.
    tl.debug_barrier()
    kind = queries.dtype.element_ty
    tl.store(pairs, (first * c[None, :] - second * s[None, :]).to(kind), mask=here)
    tl.store(pairs + APART, (second * c[None, :] + first * s[None, :]).to(kind), mask=here)

    if tl.program_id(1) == 0:
        location = tl.load(locations + token)
        page = location // PAGE_SIZE
        row = pages + page * page_stride + (location - page * PAGE_SIZE) * (RANK + ROTATED)
        source = latents + token * latent_stride
        dims = tl.arange(0, RANK_TILE)
        inside = dims < RANK
        latent = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        factors = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32) + weight_offset
        value = (latent * scale * factors).to(kind)
        # Attention multiplies unseen values by 0, and NaN times 0 is NaN. So a bad value is written
        # as zeros, with NaN after it: only the rows that see it get NaN.
        finite = tl.abs(value.to(tl.float32)) < float("inf")
        broken = tl.max(tl.where(finite, 0.0, 1.0), 0) > 0.0
        tl.store(row + dims, tl.where(broken, 0.0, value).to(kind), mask=inside)
        key = source + RANK + pair * STEP
        one = tl.load(key, mask=paired, other=0.0).to(tl.float32)
        other = tl.load(key + APART, mask=paired, other=0.0).to(tl.float32)
        to = row + RANK + pair * STEP
        nan = float("nan")
        tl.store(to, tl.where(broken, nan, one * c - other * s).to(kind), mask=paired)
        tl.store(to + APART, tl.where(broken, nan, other * c + one * s).to(kind), mask=paired)
        if REST_TILE > 0:
            rest = 2 * HALF + tl.arange(0, REST_TILE)
            held = rest < ROTATED
            plain = tl.load(source + RANK + rest, mask=held, other=0.0)
            tl.store(row + RANK + rest, plain, mask=held)


@triton.jit
def attention_kernel(
    queries,
    out,
    pages,
    page_table,
    query_start,
    context_lens,
    query_blocks,
    log_sums,
    row_stride,
    page_stride,
    table_stride,
    factor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    DECODES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTATED_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of tokens, tile of its rows). With DECODES a block is the one token of the
    sequence of that number. `log_sums` [T, Hq] or None."""
    if DECODES:
        sequence = tl.program_id(0)
        skipped = 0
        sequence_start = sequence
        tokens = 1
    else:
        sequence = tl.load(query_blocks + 2 * tl.program_id(0))
        skipped = tl.load(query_blocks + 2 * tl.program_id(0) + 1)
        sequence_start = tl.load(query_start + sequence)
        tokens = tl.load(query_start + sequence + 1) - sequence_start
    context = tl.load(context_lens + sequence)
    first_row = tl.program_id(1) * ROWS
    rows = tl.minimum(tokens - skipped, QUERY_BLOCK) * HEADS
    if first_row >= rows:
        return

    row = first_row + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    first_position = context - tokens + skipped
    position = first_position + token
    dims = tl.arange(0, RANK_TILE)
    turned_dims = tl.arange(0, ROTATED_TILE)
    within = dims < RANK
    turned_within = turned_dims < ROTATED
    here = row < rows
    block_token = (sequence_start + skipped).to(tl.int64)
    q_at = queries + block_token * row_stride + token * row_stride + head * (RANK + ROTATED)
    latent_q = tl.load(
        q_at[:, None] + dims[None, :], mask=here[:, None] & within[None, :], other=0.0
    )
    turned_q = tl.load(
        q_at[:, None] + RANK + turned_dims[None, :],
        mask=here[:, None] & turned_within[None, :],
        other=0.0,
    )

    table = page_table + sequence.to(tl.int64) * table_stride
    end = first_position + (tl.minimum(first_row + ROWS, rows) - 1) // HEADS + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for first in tl.range(0, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        held = keys < end
        page = tl.load(table + keys // PAGE_SIZE, mask=held, other=0).to(tl.int64)
        key_at = pages + page * page_stride + keys % PAGE_SIZE * (RANK + ROTATED)
        latents = tl.load(
            key_at[:, None] + dims[None, :], mask=held[:, None] & within[None, :], other=0.0
        )
        turned = tl.load(
            key_at[:, None] + RANK + turned_dims[None, :],
            mask=held[:, None] & turned_within[None, :],
            other=0.0,
        )
        scores = tl.dot(latent_q, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(turned_q, tl.trans(turned), scores, input_precision=PRECISION)
        seen = held[None, :] & (keys[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        top, total, acc = fold(scores, factor, latents, top, total, acc, PRECISION)

    out_row = block_token * HEADS + row
    if log_sums is not None:
        tl.store(log_sums + out_row, log_sum_exp(top, total), mask=here)
    to = out + out_row[:, None] * RANK + dims[None, :]
    result = finish(total, acc).to(out.dtype.element_ty)
    tl.store(to, result, mask=here[:, None] & within[None, :])


def latent_write(
    queries: Tensor, latents: Tensor, at: GpuKVLayer, rotation: Rotation, norm: RMSNorm
) -> None:
    """Do `aioserve.ops.Backend.latent_write`. Callers have checked the arguments."""
    batch, kv, layer = at
    if not queries.shape[0]:
        return
    rank, rotated, half = kv.latent_rank, kv.head_dim - kv.latent_rank, rotation.cos.shape[1]
    heads, rest = queries.shape[1] // kv.head_dim, rotated - 2 * half
    head_tile = min(16, triton.next_power_of_2(heads))
    pages, _ = kv.layer(layer)
    write_kernel[(queries.shape[0], triton.cdiv(heads, head_tile))](
        queries,
        latents,
        batch.positions,
        batch.token_locations[at.group],
        pages,
        norm.weight,
        rotation.cos,
        rotation.sin,
        queries.stride(0),
        latents.stride(0),
        kv.page_stride,
        norm.eps,
        norm.weight_offset,
        HEADS=heads,
        RANK=rank,
        ROTATED=rotated,
        PAGE_SIZE=kv.page_size,
        HALF=half,
        STEP=2 if rotation.interleaved else 1,
        APART=1 if rotation.interleaved else half,
        HEAD_TILE=head_tile,
        RANK_TILE=triton.next_power_of_2(rank),
        HALF_TILE=triton.next_power_of_2(half),
        REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )


def latent_attention(
    queries: Tensor,
    at: GpuKVLayer,
    kind: AttentionKind,
    log_sums: Tensor | None,
    target: int,
) -> Tensor:
    """Attend from all tokens, on a device of compute capability `target`: `[T, Hq * R]`. Arguments
    must fit each other.

    Raises ValueError for a scale that isn't above 0, and for a window, a cap or sinks.
    """
    if not kind.scale > 0:
        raise ValueError(f"scale must be above 0, got {kind.scale}")
    if kind.window or kind.soft_cap or kind.sinks is not None:
        raise ValueError("attention over latents has no window, soft cap or sinks on a GPU")
    batch, kv, layer = at
    rank, heads = kv.latent_rank, queries.shape[1] // kv.head_dim
    shape = (queries.shape[0], heads * rank)
    out = torch.empty(shape, dtype=queries.dtype, device=queries.device)
    pages, _ = kv.layer(layer)
    page_table = batch.page_tables[at.group]
    factor, _ = score_units(kind)
    tile = latent_tile(kv.dtype, target)
    for decodes, blocks in ((True, batch.num_decodes), (False, batch.query_blocks.shape[0])):
        if not blocks:
            continue
        rows = heads * (1 if decodes else QUERY_BLOCK)
        attention_kernel[(blocks, triton.cdiv(rows, tile.rows))](
            queries,
            out,
            pages,
            page_table,
            batch.query_start,
            batch.context_lens,
            batch.query_blocks,
            log_sums,
            queries.stride(0),
            kv.page_stride,
            page_table.stride(0),
            factor,
            HEADS=heads,
            RANK=rank,
            ROTATED=kv.head_dim - rank,
            PAGE_SIZE=kv.page_size,
            QUERY_BLOCK=QUERY_BLOCK,
            DECODES=decodes,
            ROWS=tile.rows,
            KEYS=tile.keys,
            RANK_TILE=padded_dims(rank),
            ROTATED_TILE=padded_dims(kv.head_dim - rank),
            PRECISION="ieee" if kv.dtype is torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
