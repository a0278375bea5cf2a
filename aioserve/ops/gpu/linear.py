"""Linear layers by torch: cuBLAS on a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from aioserve.ops.reference import TorchLinear

__all__ = ["GpuLinear"]


class GpuLinear(TorchLinear):
    """`TorchLinear` that leaves the host out of it."""

    __slots__ = ()

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows by id. An id that is no row is an error that ruins the device: to check ids
        first, the host would have to wait for them."""
        self._check_ids(ids)
        return functional.embedding(ids, self._weight)
