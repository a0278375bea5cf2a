"""The memory that holds keys and values, in pages.

Knows sizes and layout. Which request owns a page is the business of `aioserve.kv`; a backend
allocates the memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "KVCache",
    "KVShape",
    "PlainKVCache",
    "copy_plain_pages",
    "lazy_memory",
]

Layer = tuple[torch.Tensor, torch.Tensor]


class KVShape(NamedTuple):
    """Sizes of the KV pages of all layers."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers, keys and values together.

        In whole steps of 4 bytes, as kernels lay keys out: an odd `head_dim` counts as one more
        where two dimensions share a step.
        """
        steps = -(-self.head_dim * self.dtype.itemsize // 4)
        return self.num_layers * 2 * self.num_kv_heads * self.page_size * steps * 4

    def plain(self) -> tuple[int, ...]:
        """The shape of `PlainKVCache.storage`. Raises ValueError for a size below 1, naming it."""
        layers, pages, page_size, heads, head_dim, _ = self
        sizes = layers, pages, page_size, heads, head_dim
        for name, size in zip(self._fields, sizes, strict=False):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        return (layers, 2, pages, heads, page_size, head_dim)


def lazy_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the process that costs nothing until it is touched, in huge pages if there are any.

    Attention jumps between KV pages all over this memory; with pages of 4 KiB each jump misses the
    TLB, which takes a quarter of the time of a decode over cold caches.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.empty(shape, dtype=dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class KVCache(ABC):
    """Key and value pages of every layer.

    `storage` holds them as the kernels of a backend read them; its shape begins with
    `[num_layers, 2, num_pages, num_kv_heads]`, where index 0 of the second axis holds keys, 1
    values. A page that was never written holds arbitrary bits.
    """

    __slots__ = (
        "bytes_per_page",
        "dtype",
        "head_dim",
        "num_kv_heads",
        "num_layers",
        "num_pages",
        "page_size",
        "storage",
    )

    def __init__(self, storage: torch.Tensor, *, page_size: int, head_dim: int) -> None:
        # Read by every op of every layer: an attribute costs a tenth of a tensor's shape.
        self.storage: torch.Tensor = storage
        self.dtype: torch.dtype = storage.dtype
        self.num_layers: int = storage.shape[0]
        self.num_pages: int = storage.shape[2]
        self.num_kv_heads: int = storage.shape[3]
        self.page_size: int = page_size
        self.head_dim: int = head_dim
        self.bytes_per_page: int = storage.nbytes // self.num_pages

    @abstractmethod
    def prefault(self, plane: int, first: int, end: int) -> None:
        """Has the system provide the memory of pages [first, end) in one plane, as a first write
        would. A plane is the keys or the values of a layer: there are 2 * num_layers."""


class PlainKVCache(KVCache):
    """`storage` is `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`."""

    __slots__ = ("layers",)

    def __init__(self, storage: torch.Tensor) -> None:
        if storage.dim() != 6 or storage.shape[1] != 2:
            raise ValueError(
                "storage must have shape [num_layers, 2, num_pages, num_kv_heads, page_size, "
                f"head_dim], got {tuple(storage.shape)}"
            )
        if not storage.is_contiguous():
            raise ValueError(f"storage must be contiguous, got strides {storage.stride()}")
        super().__init__(storage, page_size=storage.shape[4], head_dim=storage.shape[5])
        self.layers: tuple[Layer, ...] = tuple((layer[0], layer[1]) for layer in storage)

    def layer(self, index: int) -> Layer:
        """`(k_pages, v_pages)`, each `[num_pages, num_kv_heads, page_size, head_dim]`."""
        return self.layers[index]

    def prefault(self, plane: int, first: int, end: int) -> None:
        """Do nothing: the first write has the memory provided."""


def copy_plain_pages(caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
    """`Backend.copy_pages` of plain caches by torch, on whatever device they are."""
    for source_cache, source, target_cache, target, tokens in copies.tolist():
        pages = caches[source_cache].storage[:, :, source]
        caches[target_cache].storage[:, :, target, :, :tokens] = pages[:, :, :, :tokens]
