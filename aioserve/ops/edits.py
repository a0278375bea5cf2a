"""Changes of a step's logits between the model and the draw, as ops see them.

Knows which rows are changed, so that the others are left as the model's own ops left them; must not
know why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.checks import check_tensor

__all__ = ["LogitEdits", "RowMask", "leave_out"]

RowMask = tuple[int, npt.NDArray[np.int32]]
"""A row, and int32 `[ceil(V / 32)]`: bit `i % 32` of word `i // 32` says whether id `i` may be
drawn from it."""


class LogitEdits(Protocol):
    @property
    def rows(self) -> Collection[int]:
        """Indices of the rows that `apply` changes, or reads."""
        ...

    def apply(self, logits: Tensor) -> None:
        """Change these rows of `logits`, float32 `[S, V]` contiguous, in place. The others may hold
        anything."""
        ...


def leave_out(logits: Tensor, masks: Sequence[RowMask]) -> None:
    """Set what a row's mask doesn't have to -inf in `logits`, float32 `[S, V]` on the CPU.

    Raises IndexError for a row that isn't there, ValueError for a mask of another length.
    """
    check_tensor("logits", logits, torch.float32, logits.shape, torch.device("cpu"))
    _native.leave_out(logits.data_ptr(), *logits.shape, masks)
