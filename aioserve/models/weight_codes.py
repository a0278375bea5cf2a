"""Weights of 8-bit or 4-bit float codes with a scale for each group of inputs.

FP8, NF4 and FP4 weights of files take this form, and backends compute it. Values only: no files, no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError

__all__ = ["WeightCodes"]


@dataclass(frozen=True, slots=True, eq=False)
class WeightCodes:
    """Rows of a weight `w`, which has for row o and input i the float32 number

        w[o, i] = table[codes[o, i]] * scales[o, i // group_size]

    - codes: uint8 [out, in], below 16 if the table has 16 numbers.
    - table: float32 [16] or [256].
    - scales: float32 [out, groups]; the last group of a row may be shorter than the others.

    Raises `WeightsError` naming an argument of the wrong type, shape or range.
    """

    codes: npt.NDArray[np.uint8]
    table: npt.NDArray[np.float32]
    scales: npt.NDArray[np.float32]
    group_size: int

    def __post_init__(self) -> None:
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or 0 in self.codes.shape:
            raise WeightsError(
                "codes must be uint8 of shape [out, in], got "
                f"{self.codes.dtype} of shape {list(self.codes.shape)}"
            )
        if self.group_size < 1:
            raise WeightsError(f"group_size must be at least 1, got {self.group_size}")
        shape = len(self.codes), -(-self.codes.shape[1] // self.group_size)
        if self.scales.dtype != np.float32 or self.scales.shape != shape:
            raise WeightsError(
                f"scales must be float32 of shape {list(shape)}, got "
                f"{self.scales.dtype} of shape {list(self.scales.shape)}"
            )
        if self.table.dtype != np.float32 or self.table.shape not in ((16,), (256,)):
            raise WeightsError(
                "table must be float32 of shape [16] or [256], got "
                f"{self.table.dtype} of shape {list(self.table.shape)}"
            )
        if self.codes.max() >= len(self.table):
            raise WeightsError(
                f"codes must be below {len(self.table)}, the size of the table, got "
                f"{self.codes.max()}"
            )

    def is_below(self, limit: np.float32) -> bool:
        """True if a quick bound shows that all weights and scales are finite and below `limit`.

        The bound is on magnitudes. False may be too cautious."""
        known = np.isfinite(self.table)
        if not known.all() and not known[self.codes].all():
            return False
        largest = np.abs(self.table[known]).max(initial=1)
        return bool(np.abs(self.scales).max() < limit / largest)

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Compute the weight, float32 [out, in]."""
        each = np.repeat(self.scales, self.group_size, axis=1)[:, : self.codes.shape[1]]
        return self.table[self.codes] * each
