"""Paged attention: the prompts of a batch in one launch, its decodes in another.

Triton computes decodes. It computes prompts too, unless a `PromptAttention` does, which has no
sinks and no log-sum-exp. Latent pages have kernels of their own.
`aioserve.ops.Backend.paged_attention` defines the result.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.attention_decode import decode
from aioserve.ops.gpu.attention_prefill import prefill
from aioserve.ops.gpu.attention_tiles import AttentionTiles, attention_tiles
from aioserve.ops.gpu.gpu_batch import GpuKVLayer
from aioserve.ops.gpu.latent_attention import latent_attention

__all__ = ["PromptAttention", "paged_attention"]


class PromptAttention(Protocol):
    """Attends from the prompts of a batch in place of Triton's kernels."""

    def __call__(self, out: Tensor, qkv: Tensor, at: GpuKVLayer, kind: AttentionKind) -> None:
        """Fill the rows of `out` after the batch's `num_decodes`. Waits for nothing."""
        ...


def paged_attention(
    qkv: Tensor,
    at: GpuKVLayer,
    kind: AttentionKind,
    *,
    tiles: AttentionTiles | None = None,
    prompts: PromptAttention | None = None,
    log_sum_exp: Tensor | None = None,
) -> Tensor:
    """Attend from all tokens. Arguments must fit each other. `tiles` is None for those of the
    device.

    Raises ValueError for a scale that isn't above 0.
    """
    if at.kv.latent_rank:
        return latent_attention(qkv, at, kind, log_sum_exp, _target(qkv.device))
    if not kind.scale > 0:
        raise ValueError(f"scale must be above 0, got {kind.scale}")
    batch, kv, _ = at
    tiles = tiles or attention_tiles(kv.head_dim, kv.dtype, _target(qkv.device))
    size = qkv.shape[1] - 2 * kv.num_kv_heads * kv.head_dim
    out = torch.empty((qkv.shape[0], size), dtype=qkv.dtype, device=qkv.device)
    decode(out, log_sum_exp, qkv, at, kind, tiles)
    if prompts is None or kind.sinks is not None or log_sum_exp is not None:
        prefill(out, log_sum_exp, qkv, at, kind, tiles)
    elif qkv.shape[0] > batch.num_decodes:
        prompts(out, qkv, at, kind)
    return out


@lru_cache
def _target(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
