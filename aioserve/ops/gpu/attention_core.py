"""Functions that prefill and decode share: addresses of keys, and softmax in one pass.

Scores are in units of log2, so that weights are powers of two. A row keeps the largest score so far
(`top`), the sum of its weights relative to it (`total`) and their weighted values (`acc`), all
float32. See Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

Two compilations of these functions must round alike, so sums of products are explicit `fma`s
wherever a compiler could choose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.attention_tiles import Tile, padded_dims
from aioserve.ops.kv_cache import KVCache

__all__ = [
    "add_sink",
    "capped",
    "finish",
    "fold",
    "key_offsets",
    "launch_constants",
    "load_keys",
    "log_sum_exp",
    "merge",
    "score_units",
]

_LOG2_E = math.log2(math.e)


def score_units(kind: AttentionKind) -> tuple[float, float]:
    """Return (factor, cap) of scores in units of log2.

    A soft cap is a tanh, computed from a power of two. `c * tanh(s / c)` equals `c - 2 * c / (1 + 2
    ** (2 * s / c * log2(e)))`.
    """
    factor = kind.scale * _LOG2_E
    if kind.soft_cap > 0:
        return 2 * factor / kind.soft_cap, kind.soft_cap * _LOG2_E
    return factor, 0.0


def launch_constants(kv: KVCache, group: int, kind: AttentionKind, tile: Tile) -> dict[str, Any]:
    """Return the constants of a launch, with `group` query heads for each KV head."""
    return {
        "GROUP": group,
        "KV_HEADS": kv.num_kv_heads,
        "HEAD_DIM": kv.head_dim,
        "PAGE_SIZE": kv.page_size,
        "HAS_WINDOW": kind.window > 0,
        "HAS_CAP": kind.soft_cap > 0,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DIMS": padded_dims(kv.head_dim),
        "PRECISION": "ieee" if kv.dtype is torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


@triton.jit
def key_offsets(
    pages,
    page_stride,
    head,
    start,
    held,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Offsets of keys `start` to `start + KEYS` of a KV head in a layer's pages, int64 [KEYS].

    `pages` is the sequence's row of the page table. A layer's pages are `page_stride` numbers
    apart. Keys that are not `held` get an offset that must not be read, and no page is looked up
    only for them. Requires a `start` that is a multiple of KEYS, and some held key.
    """
    at = start + tl.arange(0, KEYS)
    if PAGE_SIZE % KEYS == 0:
        page = tl.load(pages + start // PAGE_SIZE)
    else:
        page = tl.load(pages + at // PAGE_SIZE, mask=held, other=0)
    return page.to(tl.int64) * page_stride + (head * PAGE_SIZE + at % PAGE_SIZE) * HEAD_DIM


@triton.jit
def load_keys(
    base, offsets, held, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr
):
    """Keys or values [KEYS, DIMS]. With MASKED, zero where not `held`."""
    dims = tl.arange(0, DIMS)
    at = base + offsets[:, None] + dims[None, :]
    if MASKED:
        if DIMS == HEAD_DIM:
            rows = tl.load(at, mask=held[:, None], other=0.0)
        else:
            rows = tl.load(at, mask=held[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    else:
        if DIMS == HEAD_DIM:
            rows = tl.load(at)
        else:
            rows = tl.load(at, mask=dims[None, :] < HEAD_DIM, other=0.0)
    return rows


@triton.jit
def capped(products, factor, cap):
    """`cap * tanh(products * factor / 2)`, where `factor` is in units of log2."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(products * factor))


@triton.jit
def fold(scores, factor, values, top, total, acc, PRECISION: tl.constexpr):
    """Fold in keys with `scores * factor`, which are -inf for keys that a row doesn't see."""
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    # For a row that has seen no key yet, -inf minus -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(top - base)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    total = tl.fma(total, keep, tl.sum(weights, 1))
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def merge(top, total, acc, part_top, part_total, part_acc):
    """Merge the results of another part of the context."""
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(top - base)
    weight = tl.exp2(part_top - base)
    total = tl.fma(total, keep, part_total * weight)
    acc = tl.fma(acc, keep[:, None], part_acc * weight[:, None])
    return higher, total, acc


@triton.jit
def add_sink(top, total, acc, sink):
    """Fold in a score without a value, in natural units."""
    part_top = sink * 1.4426950408889634
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(top - base)
    total = tl.fma(total, keep, tl.exp2(part_top - base))
    return higher, total, acc * keep[:, None]


@triton.jit
def log_sum_exp(top, total):
    """Natural logarithm of the sum of all weights: -inf in a row that saw no key."""
    return tl.fma(top, 0.6931471805599453, tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def finish(total, acc):
    """Result of attention: 0 in a row that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
