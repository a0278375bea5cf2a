"""Keys and values of KV pages as plain arrays, for the layouts of all backends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aioserve.ops import KVCache
from aioserve.ops.native_types import NativeKVCache

__all__ = ["by_layer", "contents", "fill"]


def contents(kv: KVCache) -> Tensor:
    """Copy KV to `[layers_per_page, 2, num_pages, num_kv_heads, page_size, head_dim]`.

    For latents, the second size is 1."""
    if kv.latent_rank:
        rows = by_layer(kv).flatten(4).unflatten(-1, (kv.page_size, -1))
        return rows[..., : kv.head_dim].clone(memory_format=torch.contiguous_format)
    if not isinstance(kv, NativeKVCache):
        return by_layer(kv).clone(memory_format=torch.contiguous_format)
    keys, values = _keys(kv), _values(kv)
    keys = keys.transpose(-2, -3).flatten(-2)[..., : kv.head_dim]
    if values.dim() == 6:
        values = values.transpose(-1, -2).flatten(-3, -2)
    return torch.stack([keys, values], dim=1)


def fill(kv: KVCache, values: Tensor) -> None:
    """Write `values`, which `contents` then returns, to all pages."""
    if not isinstance(kv, NativeKVCache):
        by_layer(kv).copy_(values)
        return
    keys, own_values = _keys(kv), _values(kv)
    new_keys, new_values = values.to(kv.dtype).unbind(1)
    steps, _, per_step = keys.shape[-3:]
    padded = functional.pad(new_keys, (0, steps * per_step - kv.head_dim))
    keys.copy_(padded.unflatten(-1, (steps, per_step)).transpose(-2, -3))
    if own_values.dim() == 6:
        new_values = new_values.unflatten(-2, (-1, 2)).transpose(-1, -2)
    own_values.copy_(new_values)


def by_layer(kv: KVCache) -> Tensor:
    """View the storage as `[layers_per_page, 2, num_pages, num_kv_heads, ...]`."""
    return kv.storage.movedim(0, 2)


def _keys(kv: KVCache) -> Tensor:
    """View keys: `[layers_per_page, num_pages, num_kv_heads, steps, page_size, dims of a step]`."""
    return by_layer(kv)[:, 0].unflatten(-1, (-1, kv.page_size, 4 // kv.dtype.itemsize))


def _values(kv: KVCache) -> Tensor:
    """View values: `[layers_per_page, num_pages, num_kv_heads, page_size, head_dim]`.

    If tokens are in pairs, it is `[..., page_size / 2, head_dim, 2]`."""
    size, dim = kv.page_size, kv.head_dim
    values = by_layer(kv)[:, 1, ..., : size * dim]
    paired = kv.dtype is torch.bfloat16 and size % 2 == 0
    return values.unflatten(-1, (size // 2, dim, 2) if paired else (size, dim))
