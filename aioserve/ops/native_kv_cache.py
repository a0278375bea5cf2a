"""KV pages of the process's own memory, laid out for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aioserve import _native
from aioserve.ops.checks import own
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


def own_pages(kv: KVCache) -> _native.KVPages:
    return own("kv", kv, NativeKVCache, "allocated").pages
