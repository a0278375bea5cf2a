"""The memory that holds keys and values, in pages.

Knows sizes and layout. Which page belongs to whom is the business of `aioserve.kv`; a backend
allocates it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass, field

import torch

__all__ = ["KVCache", "bytes_per_page", "lazy_memory", "storage_shape"]

Layer = tuple[torch.Tensor, torch.Tensor]


def bytes_per_page(
    num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that one page takes over all layers, keys and values together."""
    return num_layers * 2 * num_kv_heads * page_size * head_dim * dtype.itemsize


def storage_shape(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """The shape of `KVCache.storage`. Raises ValueError for a size below 1, naming it."""
    sizes = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    return (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)


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


@dataclass(slots=True, frozen=True)
class KVCache:
    """Key and value pages of every layer, in one tensor.

    `storage` has shape `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`; index 0 of
    the second axis holds keys, 1 values. A page that was never written holds arbitrary bits.
    """

    storage: torch.Tensor
    layers: tuple[Layer, ...] = field(init=False, repr=False, compare=False)
    num_layers: int = field(init=False)
    num_pages: int = field(init=False)
    num_kv_heads: int = field(init=False)
    page_size: int = field(init=False)
    head_dim: int = field(init=False)

    def __post_init__(self) -> None:
        if self.storage.dim() != 6 or self.storage.shape[1] != 2:
            raise ValueError(
                "storage must have shape [num_layers, 2, num_pages, num_kv_heads, page_size, "
                f"head_dim], got {tuple(self.storage.shape)}"
            )
        if not self.storage.is_contiguous():
            raise ValueError(f"storage must be contiguous, got strides {self.storage.stride()}")
        layers = tuple((layer[0], layer[1]) for layer in self.storage)
        object.__setattr__(self, "layers", layers)
        # Read by every op of every layer: an attribute costs a tenth of a tensor's shape.
        names = ("num_layers", "_", "num_pages", "num_kv_heads", "page_size", "head_dim")
        for name, size in zip(names, self.storage.shape, strict=True):
            if name != "_":
                object.__setattr__(self, name, size)

    def layer(self, index: int) -> Layer:
        """`(k_pages, v_pages)`, each `[num_pages, num_kv_heads, page_size, head_dim]`."""
        return self.layers[index]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def bytes_per_page(self) -> int:
        return bytes_per_page(
            self.num_layers, self.page_size, self.num_kv_heads, self.head_dim, self.dtype
        )
