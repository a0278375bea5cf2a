"""Linear layers over a weight that a backend keeps in a form of its own.

Knows weights, rows and dtypes; must not know models or batches of requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from aioserve import _native
from aioserve.formats.weights import PackedLinear

__all__ = ["HeldWeight", "Linear", "PerHeadLinear", "TorchPerHead", "check_per_head", "plain"]


HeldWeight = Tensor | _native.LinearKernel | PackedLinear
"""A weight in memory: plain floats, or made for CPUs or GPUs while it was read."""


def plain(weight: HeldWeight, backend: str) -> Tensor:
    """Return a plain weight. Raises TypeError for other forms, naming the backend that computes
    only plain ones."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"the backend {backend} computes no {type(weight).__name__}")
    return weight


class Linear(ABC):
    """`y = x @ weight.T + bias` without gradients; sums are float32.

    weight: [N, K] of one of `dtypes`, on the CPU, of any strides. bias: [N] of the same dtype, or
    None. Both may be dropped afterwards. `out_dtype` is the dtype of y: the weight's by default, or
    float32 (for logits).

    Raises:
        TypeError: a dtype that is not supported or differs from the weight's.
        ValueError: a shape or device that does not fit, naming the argument.
    """

    __slots__ = ("dtype", "in_features", "num_bytes", "out_dtype", "out_features")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    """Dtypes that a weight may have."""
    num_bytes: int
    """Bytes of the weight in the backend's form."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        if weight.dtype not in self.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise TypeError(f"weight must be {names}, got {weight.dtype}")
        if weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(f"weight must be of shape [N, K], got {list(weight.shape)}")
        if not weight.is_cpu:
            raise ValueError(f"weight must be on the CPU, got {weight.device}")
        self._describe(weight.shape[0], weight.shape[1], weight.dtype, out_dtype)
        if bias is None:
            return
        if bias.dtype is not weight.dtype:
            raise TypeError(f"bias must be {weight.dtype} as the weight, got {bias.dtype}")
        if bias.shape != weight.shape[:1] or not bias.is_cpu:
            raise ValueError(
                f"bias must be a CPU tensor of shape [{weight.shape[0]}], "
                f"got {list(bias.shape)} on {bias.device}"
            )

    def _describe(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None,
    ) -> None:
        if out_dtype not in (None, dtype, torch.float32):
            raise TypeError(f"out_dtype must be {dtype} or torch.float32, got {out_dtype}")
        self.out_features: int = out_features
        self.in_features: int = in_features
        self.dtype: torch.dtype = dtype
        self.out_dtype: torch.dtype = out_dtype or dtype

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] of the weight's dtype, dense rows -> [T, out_features]."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """weight[ids]: ids int64 [n] -> [n, in_features] in the weight's dtype.

        This is the embedding if the head is tied to it, without a second copy of the table.

        Raises IndexError for an id outside [0, out_features).
        """

    def _refuse(self, x: Tensor) -> NoReturn:
        if x.dtype is not self.dtype:
            raise TypeError(f"x must be {self.dtype} as the weight, got {x.dtype}")
        raise ValueError(
            f"x must be of shape [T, {self.in_features}] with dense rows on the weight's device, "
            f"got {list(x.shape)} with strides {x.stride()} on {x.device}"
        )

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        if ids.dim() != 1 or not ids.is_contiguous():
            raise ValueError(
                f"ids must be a contiguous tensor of shape [n], got {list(ids.shape)} with "
                f"strides {ids.stride()}"
            )


class PerHeadLinear(ABC):
    """A product for each head of a row: head h of y is head h of x times the weight of head h.

    x: `[T, H * (K + passed)]`, y: `[T, H * (N + passed)]`, of the weights' dtype. The last `passed`
    numbers of each head of x follow its product in y, unchanged. Sums are float32.
    """

    __slots__ = ("dtype", "in_columns", "num_bytes", "out_columns")

    dtype: torch.dtype
    in_columns: int
    out_columns: int
    num_bytes: int
    """Bytes of the weights in the backend's form."""

    def __init__(self, weight: Tensor, passed: int) -> None:
        heads, out_features, in_features = check_per_head(weight, passed)
        self.dtype = weight.dtype
        self.in_columns = heads * (in_features + passed)
        self.out_columns = heads * (out_features + passed)

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def _check(self, x: Tensor, device: torch.device) -> None:
        if x.dtype is not self.dtype:
            raise TypeError(f"x must be {self.dtype} as the weights, got {x.dtype}")
        dense = x.dim() == 2 and x.shape[1] == self.in_columns and x.stride(1) == 1
        if not dense or x.device != device:
            raise ValueError(
                f"x must be of shape [T, {self.in_columns}] with dense rows on {device}, got "
                f"{list(x.shape)} with strides {x.stride()} on {x.device}"
            )


def check_per_head(weight: Tensor, passed: int) -> tuple[int, int, int]:
    """Check the weights of heads, `[H, N, K]`; return their shape."""
    if weight.dim() != 3 or 0 in weight.shape or not weight.is_cpu:
        raise ValueError(
            f"weight must be of shape [H, N, K] on the CPU, got {list(weight.shape)} on "
            f"{weight.device}"
        )
    if passed < 0:
        raise ValueError(f"passed must be at least 0, got {passed}")
    heads, out_features, in_features = weight.shape
    return heads, out_features, in_features


class TorchPerHead(PerHeadLinear):
    """`torch.bmm` over the plain weights, on one of torch's devices. The order of its sums may
    depend on the number of rows."""

    __slots__ = ("_passed", "_weight")

    def __init__(self, weight: Tensor, passed: int, device: torch.device) -> None:
        super().__init__(weight, passed)
        self._weight = weight.detach().to(device, copy=True).contiguous()
        self._passed = passed
        self.num_bytes: int = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x, self._weight.device)
        heads, out_features, in_features = self._weight.shape
        by_head = x.unflatten(1, (heads, in_features + self._passed)).transpose(0, 1)
        shape = (x.shape[0], heads, out_features + self._passed)
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
        product = torch.bmm(by_head[..., :in_features], self._weight.transpose(1, 2))
        y[..., :out_features] = product.transpose(0, 1)
        y[..., out_features:] = by_head[..., in_features:].transpose(0, 1)
        return y.flatten(1)
