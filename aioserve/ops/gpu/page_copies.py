"""Copies of KV pages within the device's memory, and between it and pinned pages of the host.

One launch of `native/cuda/page_copies.cu` for any number of copies, on torch's current stream. For
tensors that are all on the CPU, torch copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.checks import check_copies, own
from aioserve.ops.gpu.cupy_module import cupy_module
from aioserve.ops.kv_cache import KVCache, PlainKVCache, copy_plain_pages

__all__ = ["THREADS", "PageCopies"]

THREADS = 128
"""Threads of a block. A block copies one head's keys or values in one layer, for all pages."""


class PageCopies:
    """Copies between these caches, which are equal except for their number of pages.

    Raises TypeError for a cache that isn't laid out plainly, and ValueError for caches that differ.
    Beside a cache on a CUDA device, also raises ValueError for one of the host that isn't pinned.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        for i, cache in enumerate(caches):
            own(f"caches[{i}]", cache, PlainKVCache, "allocated")
            if _kind(cache) != _kind(caches[0]):
                raise ValueError(
                    f"caches[{i}] must be like caches[0] in all but num_pages, got {_kind(cache)} "
                    f"and {_kind(caches[0])}"
                )
        self.caches: tuple[KVCache, ...] = tuple(caches)
        storages = [cache.storage for cache in caches]
        self._device: torch.device | None = next((s.device for s in storages if s.is_cuda), None)
        if self._device is None:
            return
        for i, storage in enumerate(storages):
            if storage.device != self._device and not storage.is_pinned():
                raise ValueError(
                    f"caches[{i}] must be on {self._device} or pinned, got {storage.device}"
                )
        # Pinned memory has one address, for the host and for the device.
        table = [cache.storage.data_ptr() for cache in caches]
        self._table: Tensor = _uploaded(torch.tensor(table, dtype=torch.int64), self._device)

    def __call__(self, copies: npt.NDArray[np.int32]) -> None:
        """Make `copies`, in the form of `Backend.copy_pages`."""
        if copies.dtype != np.int32 or copies.ndim != 2 or copies.shape[1] != 5:
            raise ValueError(
                f"copies must be int32 of shape [N, 5], got {copies.dtype} {copies.shape}"
            )
        check_copies(self.caches, copies)
        if not len(copies):
            return
        if self._device is None:
            copy_plain_pages(self.caches, copies)
        else:
            table = torch.from_numpy(np.ascontiguousarray(copies))
            self.launch(_uploaded(table, self._device), len(copies))

    def launch(self, copies: Tensor, count: int) -> None:
        """Enqueue the first `count` rows of `copies`, int32 `[N, 5]`, which were checked.

        They are on the device, or pinned and unchanged until the copies are done.
        """
        if self._device is None:
            copy_plain_pages(self.caches, copies[:count].numpy())
            return
        first = self.caches[0]
        token_bytes = first.head_dim * first.dtype.itemsize
        cupy = cupy_module()
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(self._device).cuda_stream)
        with cupy.cuda.Device(self._device.index), stream:
            _kernel(self._device.index)(
                (first.storage.shape[1] * first.storage.shape[2] * first.num_kv_heads,),
                (THREADS,),
                (
                    np.uint64(self._table.data_ptr()),
                    np.uint64(copies.data_ptr()),
                    np.int64(count),
                    np.int64(first.page_size * token_bytes),
                    np.int64(token_bytes),
                ),
            )


def _uploaded(array: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, in the order of the current stream. The host doesn't wait."""
    return array.pin_memory().to(device, non_blocking=True)


def _kind(cache: KVCache) -> tuple[object, ...]:
    layers = cache.layout.layers_per_page
    sizes = layers, cache.num_kv_heads, cache.page_size, cache.head_dim
    return (*sizes, cache.dtype)


@functools.lru_cache
def _kernel(device_index: int) -> Any:
    """Kernel compiled for this device by CuPy, which keeps it in its own cache as well."""
    cupy = cupy_module()
    with cupy.cuda.Device(device_index):
        module = cupy.RawModule(code=_native.PAGE_COPIES_CU, options=("--std=c++17",))
        return module.get_function("copy_pages")
