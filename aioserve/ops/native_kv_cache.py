"""KV pages of the process's own memory, laid out for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aioserve import _native
from aioserve.ops.kv_cache import KVCache, lazy_memory, plain_shape
from aioserve.ops.native_types import is_bfloat16

__all__ = ["NativeKVCache", "own_pages"]

MAX_HEAD_DIM = 256


class NativeKVCache(KVCache):
    """KV pages of the process's own memory, laid out as in `native/ops/types.h`.

    `storage` has shape `[num_layers, 2, num_pages, num_kv_heads, page_size * padded_dim]`, where
    `padded_dim` is the head size in whole steps of 4 bytes: even for bfloat16.
    """

    __slots__ = ("pages",)

    def __init__(self, dtype: torch.dtype, sizes: Mapping[str, int]) -> None:
        bfloat16 = is_bfloat16("dtype", dtype)
        layers, two, num_pages, heads, page_size, head_dim = plain_shape(**sizes)
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
        padded_dim = head_dim + head_dim % 2 if bfloat16 else head_dim
        shape = (layers, two, num_pages, heads, page_size * padded_dim)
        super().__init__(lazy_memory(shape, dtype), page_size=page_size, head_dim=head_dim)
        self.pages: _native.KVPages = _native.KVPages(
            self.storage.data_ptr(), layers, num_pages, heads, page_size, head_dim, bfloat16
        )

    def prefault(self, plane: int, first: int, end: int) -> None:
        self.pages.prefault(plane, first, end)

    def plain(self) -> Tensor:
        keys, values = self._keys(), self._values()
        keys = keys.transpose(-2, -3).flatten(-2)[..., : self.head_dim]
        if values.dim() == 6:
            values = values.transpose(-1, -2).flatten(-3, -2)
        return torch.stack([keys, values], dim=1)

    def set_plain(self, values: Tensor) -> None:
        keys, own_values = self._keys(), self._values()
        new_keys, new_values = values.to(self.dtype).unbind(1)
        steps, _, per_step = keys.shape[-3:]
        padded = functional.pad(new_keys, (0, steps * per_step - self.head_dim))
        keys.copy_(padded.unflatten(-1, (steps, per_step)).transpose(-2, -3))
        if own_values.dim() == 6:
            new_values = new_values.unflatten(-2, (-1, 2)).transpose(-1, -2)
        own_values.copy_(new_values)

    def _keys(self) -> Tensor:
        """`[num_layers, num_pages, num_kv_heads, steps, page_size, dimensions of a step]`."""
        return self.storage[:, 0].unflatten(-1, (-1, self.page_size, 4 // self.dtype.itemsize))

    def _values(self) -> Tensor:
        """`[num_layers, num_pages, num_kv_heads, page_size, head_dim]`; where tokens are in pairs
        `[..., page_size / 2, head_dim, 2]`."""
        size, dim = self.page_size, self.head_dim
        values = self.storage[:, 1, ..., : size * dim]
        paired = self.dtype is torch.bfloat16 and size % 2 == 0
        return values.unflatten(-1, (size // 2, dim, 2) if paired else (size, dim))


def own_pages(kv: KVCache) -> _native.KVPages:
    if not isinstance(kv, NativeKVCache):
        raise TypeError(f"kv must be one that this backend allocated, got {type(kv).__name__}")
    return kv.pages
