"""Paged attention: the prompts of a batch in one launch, its decodes in another.

Decodes are Triton's. Prompts are too, unless a `PromptAttention` attends from them.
See `aioserve.ops.Backend.paged_attention` for what is computed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from aioserve.ops.gpu.attention_decode import decode
from aioserve.ops.gpu.attention_prefill import prefill
from aioserve.ops.gpu.attention_tiles import AttentionTiles, attention_tiles
from aioserve.ops.gpu.batch import GpuBatch
from aioserve.ops.kv_cache import PlainKVCache

__all__ = ["MAX_HEAD_DIM", "PromptAttention", "attend", "paged_attention"]

MAX_HEAD_DIM = 256
"""The largest head that tiles are made for."""

_LOG2_E = math.log2(math.e)


class PromptAttention(Protocol):
    """Attends from the prompts of a batch in place of Triton's kernels."""

    def __call__(
        self,
        out: Tensor,
        qkv: Tensor,
        batch: GpuBatch,
        kv: PlainKVCache,
        layer: int,
        *,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> None:
        """Fill the rows of `out` behind `batch.num_decodes`. Waits for nothing."""
        ...


def paged_attention(
    qkv: Tensor,
    batch: GpuBatch,
    kv: PlainKVCache,
    layer: int,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    logit_rows_only: bool,
    prompts: PromptAttention | None = None,
) -> Tensor:
    """The rows of all tokens, or of `batch.logit_rows`. Arguments that fit each other are given.

    Raises ValueError for a scale that isn't above 0.
    """
    out = attend(
        qkv,
        batch,
        kv,
        layer,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        tiles=attention_tiles(kv.head_dim, kv.dtype, _target(qkv.device)),
        prompts=prompts,
    )
    return out[batch.logit_rows] if logit_rows_only else out


def attend(
    qkv: Tensor,
    batch: GpuBatch,
    kv: PlainKVCache,
    layer: int,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    tiles: AttentionTiles,
    prompts: PromptAttention | None = None,
) -> Tensor:
    """Rows of all tokens, in the given tiles."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    heads = qkv.shape[1] // kv.head_dim - 2 * kv.num_kv_heads
    out = torch.empty((qkv.shape[0], heads * kv.head_dim), dtype=qkv.dtype, device=qkv.device)
    # Scores in units of log2. A soft cap is a tanh, made of a power of two: c * tanh(s / c) is
    # c - 2 * c / (1 + 2 ** (2 * s / c * log2(e))).
    factor, cap = scale * _LOG2_E, 0.0
    if soft_cap > 0:
        factor, cap = 2 * factor / soft_cap, soft_cap * _LOG2_E
    group = heads // kv.num_kv_heads
    where = {"group": group, "window": window, "factor": factor, "cap": cap}
    decode(out, qkv, batch, kv, layer, tiles=tiles, **where)
    if prompts is None:
        prefill(out, qkv, batch, kv, layer, tiles=tiles, **where)
    elif qkv.shape[0] > batch.num_decodes:
        prompts(out, qkv, batch, kv, layer, scale=scale, window=window, soft_cap=soft_cap)
    return out


@lru_cache
def _target(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
