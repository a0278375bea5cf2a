"""Memory that holds keys and values, in pages.

Knows sizes and layout. `aioserve.kv` decides which request owns a page; a backend allocates the
memory.
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

from aioserve.paging.format import KVEntry, KVFormat
from aioserve.paging.layout import KVLayout

__all__ = [
    "KVCache",
    "KVShape",
    "PlainKVCache",
    "copy_plain_pages",
    "format_of_floats",
    "lazy_memory",
]

Layer = tuple[torch.Tensor, torch.Tensor]


class KVShape(NamedTuple):
    """Sizes of KV pages."""

    layout: KVLayout
    """Layers that share a page, and the KV of a token in each."""
    num_pages: int
    """Pages of all groups together."""
    page_size: int
    latent_rank: int = 0
    """Number r of value numbers in latent pages; 0 for pages of keys and values. A latent page
    holds one row of `head_dim` numbers per token, which is its key, and whose first r numbers are
    its value."""

    @property
    def entry(self) -> KVEntry:
        """KV of one token in one layer."""
        return self.layout.entry

    @property
    def num_kv_heads(self) -> int:
        return self.layout.entry.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layout.entry.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return getattr(torch, self.layout.entry.format.values.dtype)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: keys and values of all layers of a group together."""
        return self.layout.bytes_per_page(self.page_size)

    def plain(self) -> tuple[int, ...]:
        """Return the shape of `PlainKVCache.storage`.

        Raises ValueError for a size below 1, naming it, and for a format with more than values.
        """
        layout, pages, page_size, rank = self
        entry = layout.entry
        heads, head_dim = entry.num_kv_heads, entry.head_dim
        for name, size in (
            ("num_pages", pages),
            ("page_size", page_size),
            ("num_kv_heads", heads),
            ("head_dim", head_dim),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        planes = [plane.name for plane in entry.format.planes]
        if len(planes) > 1:
            raise ValueError(f"format must have values alone, got {entry.format} with {planes}")
        if not 0 <= rank <= head_dim or (rank and heads != 1) or (rank > 0) != entry.latent:
            kind = layout.groups[0].kind
            raise ValueError(
                f"latent_rank must be from 1 to head_dim {head_dim}, with one head in a latent "
                f"layout, or 0, got {rank} with {heads} heads in a {kind} layout"
            )
        shape = entry.page_shape(entry.format.values, page_size)
        return (pages, layout.layers_per_page, *shape)


def format_of_floats(dtype: torch.dtype) -> KVFormat:
    """Return the format that keeps KV as it is computed, in floats of this dtype."""
    return KVFormat.of_floats(str(dtype).removeprefix("torch."), dtype.itemsize)


def lazy_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory of the process that costs nothing until it is touched, in huge pages if
    possible.

    Attention jumps between KV pages all over this memory. With pages of 4 KiB each jump misses the
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

    `storage` holds them as the kernels of a backend read them. Its shape begins with `[num_pages,
    layers_per_page, 2, num_kv_heads]`. Index 0 of the third axis holds keys, 1 values; latents,
    which are both, have 1 in place of 2. A page is one block of memory. A page that was never
    written holds arbitrary bits.
    """

    __slots__ = (
        "bytes_per_page",
        "dtype",
        "head_dim",
        "latent_rank",
        "layout",
        "num_kv_heads",
        "num_layers",
        "num_pages",
        "page_size",
        "places",
        "storage",
    )

    def __init__(self, storage: torch.Tensor, shape: KVShape) -> None:
        # Every op of every layer reads these: an attribute costs a tenth of a tensor's shape.
        self.storage: torch.Tensor = storage
        self.layout: KVLayout = shape.layout
        self.places: tuple[tuple[int, int], ...] = shape.layout.places
        """Group of each layer, and its index in the pages of the group."""
        self.dtype: torch.dtype = shape.dtype
        self.num_layers: int = len(self.places)
        self.num_pages: int = shape.num_pages
        self.num_kv_heads: int = shape.num_kv_heads
        self.page_size: int = shape.page_size
        self.head_dim: int = shape.head_dim
        self.latent_rank: int = shape.latent_rank
        self.bytes_per_page: int = storage.nbytes // shape.num_pages

    @abstractmethod
    def prefault(self, first: int, end: int) -> None:
        """Let the system provide the memory of pages [first, end), as a first write would."""


class PlainKVCache(KVCache):
    """Pages as plain tensors: `storage` is `[num_pages, layers_per_page, 2, num_kv_heads,
    page_size, head_dim]`. Latents have 1 in place of 2."""

    __slots__ = ("layers",)

    def __init__(self, storage: torch.Tensor, shape: KVShape) -> None:
        if storage.shape != shape.plain() or storage.dtype is not shape.dtype:
            raise ValueError(
                f"storage must be {shape.dtype} of shape {shape.plain()}, [num_pages, "
                "layers_per_page, 2 (latents: 1), num_kv_heads, page_size, head_dim]; got "
                f"{storage.dtype} {tuple(storage.shape)}"
            )
        if not storage.is_contiguous():
            raise ValueError(f"storage must be contiguous, got strides {storage.stride()}")
        super().__init__(storage, shape)
        self.layers: tuple[Layer, ...] = tuple(
            (storage[:, index, 0], storage[:, index, -1]) for _, index in self.places
        )

    @property
    def page_stride(self) -> int:
        """Numbers from one page of a layer to the next."""
        return self.storage.stride(0)

    def layer(self, index: int) -> Layer:
        """`(k_pages, v_pages)`, each `[num_pages, num_kv_heads, page_size, head_dim]`, with strides
        between pages. For latents the same pages twice."""
        return self.layers[index]

    def prefault(self, first: int, end: int) -> None:
        """Do nothing: the first write provides the memory."""


def copy_plain_pages(caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
    """Do `Backend.copy_pages` for plain caches in torch, on any device."""
    for source_cache, source, target_cache, target, tokens in copies.tolist():
        from_page = caches[source_cache].storage[source]
        to_page = caches[target_cache].storage[target]
        if tokens == caches[source_cache].page_size:
            to_page.copy_(from_page)
        else:
            to_page[..., :tokens, :] = from_page[..., :tokens, :]
