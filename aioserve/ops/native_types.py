"""Types shared by Python and `aioserve._native`: dtypes, a step's batch, packed weights, KV pages.

Turns tensors into addresses; `native` knows the ops that use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aioserve import _native
from aioserve.formats.weights import NATIVE_ATTENTION
from aioserve.ops.batch import Batch
from aioserve.ops.checks import own
from aioserve.ops.kv_cache import KVCache, KVShape, lazy_memory
from aioserve.ops.linear import Linear, PerHeadLinear

__all__ = [
    "CPU",
    "NativeBatch",
    "NativeKVCache",
    "NativeLinear",
    "NativePerHead",
    "address",
    "is_bfloat16",
    "own_arrays",
    "own_linear",
    "own_pages",
    "own_per_head",
]

CPU = torch.device("cpu")


_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


def address(tensor: Tensor | None) -> int:
    """Address of a tensor's numbers; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(slots=True, frozen=True)
class NativeBatch(Batch):
    """A batch whose arrays were checked once, for all layers."""

    arrays: _native.Batch


class NativeLinear(Linear):
    """Linear layer in C++, with one layout for decode and prefill. Uses the ops' own thread pool
    and instruction set.

    Only the packed copy is kept. A row's result depends on that row alone, to the last bit. The
    number of rows, its place among them, threads, and other rows' NaNs don't matter. Results in
    float32 are the sums themselves.

    For a weight of floats, every output is one chain of additions in the order of the inputs. It
    adds their products, or with AMX the sums of 32 products each. For a weight of integers, see
    `GroupedWeight`. `benchmarks/linear.py` compares both with torch.
    """

    __slots__ = ("_apply", "_float32", "_item_bytes", "packed")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight, bias, out_dtype=out_dtype)
        bias = None if bias is None else bias.detach().contiguous()
        item_bytes = weight.element_size()
        packed = _native.PackedWeight(
            weight.data_ptr(),
            self.out_features,
            self.in_features,
            weight.stride(0) * item_bytes,
            weight.stride(1) * item_bytes,
            0 if bias is None else bias.data_ptr(),
            weight.dtype is torch.bfloat16,
        )
        self._take(packed)

    @classmethod
    def of_packed(cls, packed: _native.LinearKernel, out_dtype: torch.dtype | None = None) -> Self:
        """Make the layer of a kernel that has its weight already, for example packed while it was
        read."""
        layer = cls.__new__(cls)
        dtype = torch.bfloat16 if packed.bfloat16 else torch.float32
        layer._describe(packed.out_features, packed.in_features, dtype, out_dtype)
        layer._take(packed)
        return layer

    def _take(self, packed: _native.LinearKernel) -> None:
        self._float32 = self.out_dtype is torch.float32
        self._item_bytes = self.dtype.itemsize
        self.packed: _native.LinearKernel = packed
        self._apply = packed.apply
        self.num_bytes: int = packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = x.shape if x.dim() == 2 else (0, -1)
        if (
            columns != self.in_features
            or x.dtype is not self.dtype
            or not x.is_cpu
            or (x.stride(1) != 1 and columns != 1)
        ):
            self._refuse(x)
        y = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        row_bytes = x.stride(0) * self._item_bytes
        self._apply(x.data_ptr(), rows, row_bytes, y.data_ptr(), self._float32)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        if not ids.is_cpu:
            raise ValueError(f"ids must be on the CPU, got {ids.device}")
        out = torch.empty((ids.shape[0], self.in_features), dtype=self.dtype)
        self.packed.gather(ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


class NativePerHead(PerHeadLinear):
    """Heads' products in C++. Each row's result depends on that row alone, as in `NativeLinear`."""

    __slots__ = ("kernel",)

    def __init__(self, weight: Tensor, passed: int) -> None:
        super().__init__(weight, passed)
        packed = tuple(NativeLinear(head).packed for head in weight)
        self.kernel: _native.PerHeadKernel = _native.PerHeadKernel(packed, passed)
        self.num_bytes: int = self.kernel.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x, CPU)
        y = torch.empty((x.shape[0], self.out_columns), dtype=self.dtype)
        item_bytes = self.dtype.itemsize
        self.kernel.apply(
            x.data_ptr(),
            x.shape[0],
            x.stride(0) * item_bytes,
            y.data_ptr(),
            y.stride(0) * item_bytes,
        )
        return y


def own_arrays(batch: Batch) -> _native.Batch:
    if not isinstance(batch, NativeBatch):
        batch = own("batch", batch, NativeBatch, "prepared")
    return batch.arrays


def is_bfloat16(name: str, dtype: torch.dtype) -> bool:
    """True if `dtype` is bfloat16. Raises TypeError naming `name` for a dtype that kernels lack."""
    flag = _IS_BFLOAT16.get(dtype)
    if flag is None:
        raise TypeError(f"{name} must be float32 or bfloat16, got {dtype}")
    return flag


def own_linear(layer: Linear) -> NativeLinear:
    return own("layer", layer, NativeLinear, "made")


def own_per_head(layer: PerHeadLinear) -> NativePerHead:
    return own("layer", layer, NativePerHead, "made")


class NativeKVCache(KVCache):
    """KV pages in memory of this process, laid out as in `native/ops/types.h`.

    The shape of `storage` is `[num_pages, layers_per_page, 2, num_kv_heads, page_size *
    padded_dim]`; latents have 1 in place of 2. Heads are padded to `padded_dim` numbers, whole
    steps of 4 bytes: an even number for bfloat16.
    """

    __slots__ = ("pages",)

    def __init__(self, sizes: KVShape) -> None:
        dtype, bfloat16 = sizes.dtype, is_bfloat16("dtype", sizes.dtype)
        num_pages, layers, planes, heads, page_size, head_dim = sizes.plain()
        rank = sizes.latent_rank
        limits = NATIVE_ATTENTION
        if head_dim - rank > limits.head_dim or rank > limits.largest_rank(head_dim - rank):
            raise ValueError(
                f"head_dim must be at most {limits.head_dim}, or {limits.latent_dim} of latents "
                f"with at most {limits.head_dim} beyond latent_rank {rank}, got {head_dim}"
            )
        padded_dim = sizes.entry.format.head_bytes(head_dim) // dtype.itemsize
        shape = (num_pages, layers, planes, heads, page_size * padded_dim)
        super().__init__(lazy_memory(shape, dtype), sizes)
        self.pages: _native.KVPages = _native.KVPages(
            self.storage.data_ptr(),
            num_pages,
            layers,
            heads,
            page_size,
            head_dim,
            bfloat16,
            self.places,
            sizes.layout.windows,
            rank,
        )

    def prefault(self, first: int, end: int) -> None:
        self.pages.prefault(first, end)


def own_pages(kv: KVCache) -> _native.KVPages:
    if not isinstance(kv, NativeKVCache):
        kv = own("kv", kv, NativeKVCache, "allocated")
    return kv.pages
