# Triton compiles these functions: to it an int is a constexpr, and a launch has options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention of one token per sequence, with its context in parts.

The query heads that share a KV head are the rows of a tile, so one read of keys and values serves
them. The parts depend only on the context. Each part is attended to separately, and their results
are merged in order. That happens within one program (`num_splits` 1), or in a second kernel after
several programs have stored the results of their parts. Both do the same arithmetic, so a row has
the same bits however the work is shared. Flash decoding, after Dao and others, 2023.
"""

from __future__ import annotations

import torch
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
    merge,
    score_units,
)
from aioserve.ops.gpu.attention_tiles import AttentionTiles, max_parts
from aioserve.ops.gpu.gpu_batch import GpuKVLayer
from aioserve.paging.pages import capacity_tokens

__all__ = ["decode", "decode_kernel", "merge_kernel"]


@triton.jit
def _parts(
    context,
    window,
    HAS_WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Return (first key seen, blocks of KEYS keys from that key's on, blocks in a part, parts)"""
    oldest_key = tl.maximum(context - window, 0) if HAS_WINDOW else 0
    blocks = tl.cdiv(context, KEYS) - oldest_key // KEYS
    part_blocks = tl.maximum(tl.cdiv(blocks, MAX_PARTS), PART_BLOCKS)
    return oldest_key, blocks, part_blocks, tl.cdiv(blocks, part_blocks)


@triton.jit(do_not_specialize=["window", "capacity"])
def decode_kernel(
    qkv,
    out,
    partials,
    sums,
    k_pages,
    v_pages,
    page_table,
    context_lens,
    sinks,
    log_sums,
    row_stride,
    page_stride,
    table_stride,
    capacity,
    window,
    factor,
    cap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (sequence, KV head and ROWS of its query heads, split).

    With SPLIT a part's values go to `partials` [B, Hq, capacity, D], relative to the largest score.
    That score and the sum of the weights go to `sums` [B, Hq, capacity, 2]. Otherwise there is one
    split, and the result goes to `out`. It includes the score of `sinks` [Hq], and its log-sum-exp
    goes to `log_sums` [T, Hq]. Either may be None.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) % KV_HEADS
    member = tl.program_id(1) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    query_head = head * GROUP + member
    here = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    row = sequence * (KV_HEADS * GROUP) + query_head

    context = tl.load(context_lens + sequence)
    oldest_key, blocks, part_blocks, parts = _parts(
        context, window, HAS_WINDOW, KEYS, PART_BLOCKS, MAX_PARTS
    )
    if SPLIT:
        own_parts = tl.cdiv(parts, tl.num_programs(2))
        part = tl.program_id(2) * own_parts
        start = part * part_blocks
        stop = tl.minimum(start + own_parts * part_blocks, blocks)
        if start >= stop:
            return
    else:
        part = 0
        start = 0
        stop = blocks
    part_stop = tl.minimum(start + part_blocks, stop)

    # A decode's only token is the row of the batch with its sequence's number.
    q_at = sequence * row_stride + query_head * HEAD_DIM
    q = tl.load(qkv + q_at[:, None] + dims[None, :], mask=here, other=0.0)
    pages = page_table + sequence * table_stride
    first_block = oldest_key // KEYS
    unit = 1.0 if HAS_CAP else factor

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_acc = tl.zeros([ROWS, DIMS], tl.float32)
    top, total, acc = all_top, all_total, all_acc
    # One loop over blocks, not nested ones: loads run ahead across the ends of parts.
    for block in tl.range(start, stop):
        first = (first_block + block) * KEYS
        keys = first + tl.arange(0, KEYS)
        held = (keys >= oldest_key) & (keys < context)
        offsets = key_offsets(pages, page_stride, head, first, held, PAGE_SIZE, HEAD_DIM, KEYS)
        k = load_keys(k_pages, offsets, held, HEAD_DIM, DIMS, True)
        v = load_keys(v_pages, offsets, held, HEAD_DIM, DIMS, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            scores = capped(scores, factor, cap)
        scores = tl.where(held[None, :], scores, float("-inf"))
        top, total, acc = fold(scores, unit, v, top, total, acc, PRECISION)
        if block + 1 == part_stop:
            if SPLIT:
                place = row * capacity + part
                tl.store(sums + 2 * place, top, mask=member < GROUP)
                tl.store(sums + 2 * place + 1, total, mask=member < GROUP)
                at = place[:, None] * HEAD_DIM + dims[None, :]
                tl.store(partials + at, acc, mask=here)
                part += 1
            else:
                all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, total, acc)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIMS], tl.float32)
            part_stop = tl.minimum(part_stop + part_blocks, stop)
    if not SPLIT:
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=member < GROUP, other=0.0)
            all_top, all_total, all_acc = add_sink(all_top, all_total, all_acc, sink)
        if log_sums is not None:
            tl.store(log_sums + row, log_sum_exp(all_top, all_total), mask=member < GROUP)
        at = row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + at, finish(all_total, all_acc).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["window", "capacity"])
def merge_kernel(
    out,
    partials,
    sums,
    context_lens,
    sinks,
    log_sums,
    capacity,
    window,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (sequence, query head): merges its parts, loading AT_ONCE of them at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * QUERY_HEADS + tl.program_id(1)
    dims = tl.arange(0, DIMS)[None, :]
    context = tl.load(context_lens + sequence)
    _, _, _, parts = _parts(context, window, HAS_WINDOW, KEYS, PART_BLOCKS, MAX_PARTS)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIMS], tl.float32)
    for first in tl.range(0, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            part = first + i
            place = row * capacity + part + tl.arange(0, 1)
            # Values beyond the last part change nothing.
            held = part + tl.arange(0, 1) < parts
            part_top = tl.load(sums + 2 * place, mask=held, other=float("-inf"))
            part_total = tl.load(sums + 2 * place + 1, mask=held, other=0.0)
            at = place[:, None] * HEAD_DIM + dims
            mask = held[:, None] & (dims < HEAD_DIM)
            part_acc = tl.load(partials + at, mask=mask, other=0.0)
            top, total, acc = merge(top, total, acc, part_top, part_total, part_acc)
    if sinks is not None:
        top, total, acc = add_sink(top, total, acc, tl.load(sinks + tl.program_id(1)))
    if log_sums is not None:
        tl.store(log_sums + row + tl.arange(0, 1), log_sum_exp(top, total))
    result = finish(total, acc).to(out.dtype.element_ty)
    tl.store(out + row * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


def decode(
    out: Tensor,
    log_sums: Tensor | None,
    qkv: Tensor,
    at: GpuKVLayer,
    kind: AttentionKind,
    tiles: AttentionTiles,
) -> None:
    """Fill the first `num_decodes` rows of `out`, and of `log_sums` if given."""
    batch, kv, layer = at
    decodes = batch.num_decodes
    if not decodes:
        return
    tile = tiles.decode
    # Here and in other ops, not `triton.cdiv`: it takes the host more than a microsecond.
    part_blocks = -(-tiles.part_keys // tile.keys)
    most_parts = max_parts(kv.num_kv_heads)
    # Parts of the longest context that the page table has room for.
    page_table = batch.page_tables[at.group]
    table_keys = capacity_tokens(page_table.shape[1], kv.page_size)
    capacity = min(most_parts, -(-table_keys // (part_blocks * tile.keys)))
    split = batch.num_splits > 1 and capacity > 1
    heads = out.shape[1] // kv.head_dim
    group = heads // kv.num_kv_heads
    partials, sums = out, out
    if split:
        shape = (decodes, heads, capacity)
        partials = torch.empty((*shape, kv.head_dim), dtype=torch.float32, device=qkv.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=qkv.device)
    k_pages, v_pages = kv.layer(layer)
    factor, cap = score_units(kind)
    parts = {"PART_BLOCKS": part_blocks, "MAX_PARTS": most_parts}
    constants = launch_constants(kv, group, kind, tile)
    slabs = -(-group // tile.rows)
    decode_kernel[decodes, kv.num_kv_heads * slabs, batch.num_splits if split else 1](
        qkv,
        out,
        partials,
        sums,
        k_pages,
        v_pages,
        page_table,
        batch.context_lens,
        None if split else kind.sinks,
        None if split else log_sums,
        qkv.stride(0),
        kv.page_stride,
        page_table.stride(0),
        capacity,
        kind.window,
        factor,
        cap,
        SPLIT=split,
        **parts,
        **constants,
    )
    if split:
        shared = ("HEAD_DIM", "HAS_WINDOW", "KEYS", "DIMS", "num_warps", "enable_fp_fusion")
        merge_kernel[decodes, heads](
            out,
            partials,
            sums,
            batch.context_lens,
            kind.sinks,
            log_sums,
            capacity,
            kind.window,
            QUERY_HEADS=heads,
            AT_ONCE=8,
            **parts,
            **{name: constants[name] for name in shared},
        )
