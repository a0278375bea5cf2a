"""Linear layers whose weights are packed once, when a model is loaded.

Knows weights, rows and dtypes; knows nothing about models or batches of requests.

Backends, chosen explicitly or by `backend="auto"`; `PackedLinear.backend` tells which one runs:

- `onednn`: the weight in oneDNN's own blocked layout, through torch.
- `torch`: `torch.nn.functional.linear` over the plain weight; runs everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["Backend", "PackedLinear", "pack_linear"]

Backend = Literal["auto", "torch", "onednn"]

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """`y = x @ weight.T + bias` over a weight that is packed once.

    weight: [N, K] float32 or bfloat16. bias: [N] of the same dtype, or None. The weight may be
    dropped by the caller afterwards. `out_dtype` is the dtype of y: the weight's by default, or
    float32 (logits). With the `torch` and `onednn` backends a bfloat16 product is rounded to
    bfloat16 before it becomes float32.

    Raises TypeError for a dtype and ValueError for a shape, device or backend that doesn't fit.
    """

    __slots__ = ("_bias", "_dtype", "_onednn", "_weight", "backend", "in_features", "out_dtype",
                 "out_features")  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        backend: Backend = "auto",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        _check_weight(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self.out_dtype = out_dtype or weight.dtype
        if self.out_dtype not in (weight.dtype, torch.float32):
            raise TypeError(
                f"out_dtype: expected {weight.dtype} or torch.float32, given {out_dtype}"
            )
        self.backend = _choose_backend(backend)
        self._bias = None if bias is None else bias.detach().contiguous()
        weight = weight.detach().contiguous()
        self._onednn = self.backend == "onednn"
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight) if self._onednn else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] of the weight's dtype -> [T, out_features] of `out_dtype`."""
        if x.dtype is not self._dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            self._refuse(x)
        if self._onednn:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.nn.functional.linear(x, self._weight, self._bias)
        return y if y.dtype is self.out_dtype else y.to(self.out_dtype)

    def _refuse(self, x: torch.Tensor) -> None:
        if x.dtype is not self._dtype:
            raise TypeError(f"x: expected dtype {self._dtype}, given {x.dtype}")
        raise ValueError(f"x: expected shape [T, {self.in_features}], given {list(x.shape)}")


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    backend: Backend = "auto",
    *,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """The `PackedLinear` of a weight; see there for shapes, dtypes and errors."""
    return PackedLinear(weight, bias, backend=backend, out_dtype=out_dtype)


def _onednn_is_available() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _choose_backend(backend: Backend) -> Literal["torch", "onednn"]:
    if backend == "auto":
        return "onednn" if _onednn_is_available() else "torch"
    if backend == "torch":
        return "torch"
    if backend != "onednn":
        raise ValueError(f"backend: expected 'auto', 'torch' or 'onednn', given {backend!r}")
    if not _onednn_is_available():
        raise ValueError("backend: 'onednn' is not available in this build of torch")
    return "onednn"


def _check_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dtype not in _DTYPES:
        raise TypeError(f"weight: expected float32 or bfloat16, given {weight.dtype}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight: expected shape [N, K], given {list(weight.shape)}")
    if weight.device.type != "cpu":
        raise ValueError(f"weight: expected a CPU tensor, given device {weight.device}")
    if bias is None:
        return
    if bias.dtype != weight.dtype:
        raise TypeError(f"bias: expected dtype {weight.dtype} as the weight, given {bias.dtype}")
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], given {list(bias.shape)}")
