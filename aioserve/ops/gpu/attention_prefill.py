# Triton compiles these functions: to it an int is a constexpr, and a launch has options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention of prompts and chunks of prompts, of any lengths in one launch.

A program has a tile of one block's rows for one KV head. Rows are tokens times the query heads that
share the KV head, so one read of keys and values serves all of them. The program takes the keys
that the tile sees from first to last. Only tiles of keys at the edges need masks.

Tiles of keys begin at multiples of their size, in any chunk. So a row has the same bits in any
chunk and any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.attention_core import (
    add_sink,
    capped,
    finish,
    fold,
    key_offsets,
    launch_constants,
    load_keys,
    log_sum_exp,
    score_units,
)
from aioserve.ops.gpu.attention_tiles import AttentionTiles
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK, GpuKVLayer

__all__ = ["prefill", "prefill_kernel"]


@triton.jit
def _attend(
    q,
    position,
    top,
    total,
    acc,
    k_pages,
    v_pages,
    pages,
    page_stride,
    head,
    start,
    stop,
    oldest_key,
    end,
    window,
    factor,
    cap,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold in the keys from `start` to `stop`. Both are multiples of KEYS, except for the end.

    With MASKED, keys before `oldest_key` or from `end` on aren't read, and rows see keys by their
    `position`. Without it every row sees them all.
    """
    for first in tl.range(start, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        held = (keys >= oldest_key) & (keys < end)
        offsets = key_offsets(pages, page_stride, head, first, held, PAGE_SIZE, HEAD_DIM, KEYS)
        k = load_keys(k_pages, offsets, held, HEAD_DIM, DIMS, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            scores = capped(scores, factor, cap)
        if MASKED:
            seen = keys[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > position[:, None] - window)
            scores = tl.where(seen & held[None, :], scores, float("-inf"))
        v = load_keys(v_pages, offsets, held, HEAD_DIM, DIMS, MASKED)
        unit = 1.0 if HAS_CAP else factor
        top, total, acc = fold(scores, unit, v, top, total, acc, PRECISION)
    return top, total, acc


@triton.jit(do_not_specialize=["window"])
def prefill_kernel(
    qkv,
    out,
    k_pages,
    v_pages,
    page_table,
    query_start,
    context_lens,
    query_blocks,
    sinks,
    log_sums,
    row_stride,
    page_stride,
    table_stride,
    window,
    factor,
    cap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block, KV head and tile of the block's rows).

    `sinks` [Hq] and `log_sums` [T, Hq] are those of `attention_decode`.
    """
    block = tl.program_id(0)
    head = tl.program_id(1) % KV_HEADS
    first_row = tl.program_id(1) // KV_HEADS * ROWS

    sequence = tl.load(query_blocks + 2 * block)
    skipped = tl.load(query_blocks + 2 * block + 1)
    sequence_start = tl.load(query_start + sequence)
    tokens = tl.load(query_start + sequence + 1) - sequence_start
    context = tl.load(context_lens + sequence)
    rows = tl.minimum(tokens - skipped, QUERY_BLOCK) * GROUP
    if first_row >= rows:
        return

    row = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    block_position = context - tokens + skipped
    position = block_position + token
    here = (row < rows)[:, None] & (dims < HEAD_DIM)[None, :]
    # A token's number times a stride exceeds 32 bits. Inside a block it doesn't, and rows with
    # offsets of 64 bits would hold registers that wide tiles lack.
    block_token = (sequence_start + skipped).to(tl.int64)
    q_at = token * row_stride + query_head * HEAD_DIM
    block_q = qkv + block_token * row_stride
    q = tl.load(block_q + (q_at[:, None] + dims[None, :]), mask=here, other=0.0)

    oldest = block_position + first_row // GROUP
    newest = block_position + (tl.minimum(first_row + ROWS, rows) - 1) // GROUP
    end = newest + 1
    oldest_key = tl.maximum(oldest - window + 1, 0) if HAS_WINDOW else 0
    start = oldest_key // KEYS * KEYS
    # Tiles of keys that all rows see: their ends, rounded inwards.
    plain_stop = (oldest + 1) // KEYS * KEYS
    if HAS_WINDOW:
        newest_oldest_key = tl.maximum(newest - window + 1, 0)
        plain_start = tl.minimum(tl.cdiv(newest_oldest_key, KEYS) * KEYS, plain_stop)
    else:
        plain_start = start

    pages = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if HAS_WINDOW:
        top, total, acc = _attend(
            q, position, top, total, acc, k_pages, v_pages, pages, page_stride, head,
            start, plain_start, oldest_key, end, window, factor, cap,
            HEAD_DIM, PAGE_SIZE, HAS_WINDOW, HAS_CAP, KEYS, DIMS, PRECISION, True,
        )  # fmt: skip
    top, total, acc = _attend(
        q, position, top, total, acc, k_pages, v_pages, pages, page_stride, head,
        plain_start, plain_stop, oldest_key, end, window, factor, cap,
        HEAD_DIM, PAGE_SIZE, HAS_WINDOW, HAS_CAP, KEYS, DIMS, PRECISION, False,
    )  # fmt: skip
    top, total, acc = _attend(
        q, position, top, total, acc, k_pages, v_pages, pages, page_stride, head,
        plain_stop, end, oldest_key, end, window, factor, cap,
        HEAD_DIM, PAGE_SIZE, HAS_WINDOW, HAS_CAP, KEYS, DIMS, PRECISION, True,
    )  # fmt: skip

    head_at = token * (KV_HEADS * GROUP) + query_head
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=row < rows, other=0.0)
        top, total, acc = add_sink(top, total, acc, sink)
    if log_sums is not None:
        block_sums = log_sums + block_token * (KV_HEADS * GROUP)
        tl.store(block_sums + head_at, log_sum_exp(top, total), mask=row < rows)
    out_at = head_at * HEAD_DIM
    block_out = out + block_token * (KV_HEADS * GROUP * HEAD_DIM)
    result = finish(total, acc).to(out.dtype.element_ty)
    tl.store(block_out + (out_at[:, None] + dims[None, :]), result, mask=here)


def prefill(
    out: Tensor,
    log_sums: Tensor | None,
    qkv: Tensor,
    at: GpuKVLayer,
    kind: AttentionKind,
    tiles: AttentionTiles,
) -> None:
    """Fill the rows of `out` that the batch's `query_blocks` name, and those of `log_sums` if
    given."""
    batch, kv, layer = at
    blocks = batch.query_blocks.shape[0]
    if not blocks:
        return
    k_pages, v_pages = kv.layer(layer)
    page_table = batch.page_tables[at.group]
    factor, cap = score_units(kind)
    group = out.shape[1] // kv.head_dim // kv.num_kv_heads
    block_tiles = triton.cdiv(QUERY_BLOCK * group, tiles.prefill.rows)
    prefill_kernel[blocks, kv.num_kv_heads * block_tiles](
        qkv,
        out,
        k_pages,
        v_pages,
        page_table,
        batch.query_start,
        batch.context_lens,
        batch.query_blocks,
        kind.sinks,
        log_sums,
        qkv.stride(0),
        kv.page_stride,
        page_table.stride(0),
        kind.window,
        factor,
        cap,
        QUERY_BLOCK=QUERY_BLOCK,
        **launch_constants(kv, group, kind, tiles.prefill),
    )
