"""Linear layers whose weights are packed once, when a model is loaded.

Knows weights, rows and dtypes; knows nothing about models or batches of requests.

Two backends, and `PackedLinear.backend` tells which one runs:

- `native` (what "auto" means): C++ on the ops' own thread pool and instruction set, one layout for
  decode and prefill alike. The packed copy is all that is kept. A row's result depends on that row
  alone, to the last bit: not on how many rows there are, its place among them, threads, or other
  rows' NaNs. Every output is one chain of multiply-adds in the order of the inputs.
- `torch`: `torch.nn.functional.linear` over the plain weight, to compare with. Its sums may be
  taken in another order for other numbers of rows, so rows can differ in their last bits.

Both take sums in float32. `benchmarks/linear.py` prints how the two compare, beside oneDNN's packed
layout, which torch also reaches. The latter is slower for few rows (decode), at some sizes faster
for many (prefill), needs private names of torch, and its OpenMP threads spin on the cores that
attention is waiting for.
"""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from aioserve import _native

__all__ = ["Backend", "PackedLinear", "pack_linear"]

Backend = Literal["auto", "native", "torch"]

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """`y = x @ weight.T + bias` without gradients, over a weight that is packed once.

    weight: [N, K] float32 or bfloat16 on the CPU, of any strides. bias: [N] of the same dtype, or
    None. Both may be dropped afterwards. `out_dtype` is the dtype of y: the weight's by default, or
    float32 (for logits). From bfloat16 weights `native` then returns its sums as they are; `torch`
    returns them rounded to bfloat16.

    Raises:
        TypeError: a dtype that is not supported or differs from the weight's.
        ValueError: a shape, stride, device or backend that does not fit, naming the argument.
    """

    __slots__ = ("_apply", "_bias", "_dtype", "_float32", "_item_bytes", "_packed", "_weight",
                 "backend", "in_features", "num_bytes", "out_dtype", "out_features")  # fmt: skip

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        backend: Backend = "auto",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        _check_arguments(weight, bias, backend, out_dtype)
        self.backend = "native" if backend == "auto" else backend
        self.out_features, self.in_features = weight.shape
        self.out_dtype = out_dtype or weight.dtype
        self._dtype = weight.dtype
        self._float32 = self.out_dtype is torch.float32
        self._item_bytes = weight.element_size()
        bias = None if bias is None else bias.detach().contiguous()
        if self.backend == "torch":
            self._weight, self._bias = weight.detach().contiguous(), bias
            self.num_bytes = self._weight.nbytes
            return
        self._weight = self._bias = None
        self._packed = _native.PackedWeight(
            weight.data_ptr(),
            self.out_features,
            self.in_features,
            weight.stride(0) * self._item_bytes,
            weight.stride(1) * self._item_bytes,
            0 if bias is None else bias.data_ptr(),
            self._dtype is torch.bfloat16,
        )
        self._apply = self._packed.apply
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] of the weight's dtype, dense rows -> [T, out_features]."""
        rows, columns = x.shape if x.dim() == 2 else (0, -1)
        if (
            columns != self.in_features
            or x.dtype is not self._dtype
            or not x.is_cpu
            or (x.stride(1) != 1 and columns != 1)
        ):
            self._refuse(x)
        if self._weight is not None:
            return functional.linear(x, self._weight, self._bias).to(self.out_dtype)
        y = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        row_bytes = x.stride(0) * self._item_bytes
        self._apply(x.data_ptr(), rows, row_bytes, y.data_ptr(), self._float32)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """weight[ids]: ids int64 [n] -> [n, in_features] in the weight's dtype.

        The embedding of a model whose head is tied to it, without a second copy of the table.

        Raises IndexError for an id outside [0, out_features).
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        if ids.dim() != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError(
                f"ids must be a contiguous CPU tensor of shape [n], got {list(ids.shape)} with "
                f"strides {ids.stride()} on {ids.device}"
            )
        if self._weight is not None:
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
                raise IndexError(f"ids must be from 0 to {self.out_features - 1}")
            return functional.embedding(ids, self._weight)
        out = torch.empty((ids.shape[0], self.in_features), dtype=self._dtype)
        self._packed.gather(ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def _refuse(self, x: Tensor) -> NoReturn:
        if x.dtype is not self._dtype:
            raise TypeError(f"x must be {self._dtype} as the weight, got {x.dtype}")
        raise ValueError(
            f"x must be a CPU tensor of shape [T, {self.in_features}] with dense rows, "
            f"got {list(x.shape)} with strides {x.stride()} on {x.device}"
        )


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    backend: Backend = "auto",
    *,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """The `PackedLinear` of a weight; see there for shapes, dtypes and errors."""
    return PackedLinear(weight, bias, backend=backend, out_dtype=out_dtype)


def _check_arguments(
    weight: Tensor, bias: Tensor | None, backend: str, out_dtype: torch.dtype | None
) -> None:
    if backend not in ("auto", "native", "torch"):
        raise ValueError(f"backend must be one of auto, native, torch; got {backend!r}")
    if weight.dtype not in _DTYPES:
        raise TypeError(f"weight must be float32 or bfloat16, got {weight.dtype}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be of shape [N, K], got {list(weight.shape)}")
    if not weight.is_cpu:
        raise ValueError(f"weight must be on the CPU, got {weight.device}")
    if out_dtype not in (None, weight.dtype, torch.float32):
        raise TypeError(f"out_dtype must be {weight.dtype} or torch.float32, got {out_dtype}")
    if bias is None:
        return
    if bias.dtype is not weight.dtype:
        raise TypeError(f"bias must be {weight.dtype} as the weight, got {bias.dtype}")
    if bias.shape != weight.shape[:1] or not bias.is_cpu:
        raise ValueError(
            f"bias must be a CPU tensor of shape [{weight.shape[0]}], "
            f"got {list(bias.shape)} on {bias.device}"
        )
