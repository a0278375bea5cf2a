"""Weights of integers with a scale for each group of inputs.

All integer formats of files take this form, and backends compute it. Values only: no files, no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError

__all__ = ["E2M1_TWICE", "GROUP_SIZES", "Scales", "WeightIntegers"]

Scales = Literal["float32", "float16", "bfloat16", "multiples"]
"""Kind of scales and minimums: numbers that fit a float type, or "multiples".

In "multiples", every 256 inputs of a row share one unit, and each number is an int8 times it."""

GROUP_SIZES = (16, 32, 64, 128)
"""Numbers of inputs that may share a scale. All inputs of a row may share one, too."""

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each 4-bit float, E2M1, by its code."""

_RANGES = {
    4: ((-8, 7), (0, 15)),
    5: ((-16, 15), (0, 31)),
    6: ((-32, 31), (0, 63)),
    8: ((-128, 127),),
}
"""Pairs of least and largest value that each number of bits allows."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightIntegers:
    """Rows of a weight `w`, which has for row o, input i and group g = i // group_size the number

        w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] + minimums[o, g]

    in float32: the difference is exact, the product is rounded, then the sum.

    - values: int8 [out, in]. Those of 4 bits are all within [-8, 7] or all within [0, 15], and
      those of 5 and 6 bits likewise.
    - scales: float32 [out, groups]; the last group of a row may be shorter than the others.
    - zeros: int8 [out, groups], or None for zeros of 0.
    - minimums: float32 [out, groups], or None for minimums of 0.
    - group_size: 16, 32, 64, 128 or `in`.
    - bits: 4, 5, 6 or 8.
    - table: 16 numbers from -128 to 127 that values are among, so that 4 bits choose one; None:
      values are any numbers of `bits` bits.
    - order: int32 [in]. Column c of `values` belongs to input order[c] of `w`, and groups are of
      columns. None: columns are in the order of inputs.

    Raises `WeightsError` naming an argument of the wrong type, shape or range.
    """

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.int8] | None
    minimums: npt.NDArray[np.float32] | None
    group_size: int
    bits: int
    table: tuple[int, ...] | None = None
    order: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if self.values.dtype != np.int8 or self.values.ndim != 2 or 0 in self.values.shape:
            raise WeightsError(
                f"values must be int8 of shape [out, in], got {_described(self.values)}"
            )
        if self.group_size not in GROUP_SIZES and self.group_size != self.in_features:
            raise WeightsError(
                f"group_size must be {', '.join(map(str, GROUP_SIZES))} or the number of inputs, "
                f"{self.in_features}, got {self.group_size}"
            )
        shape = (self.out_features, self.num_groups)
        _check("scales", self.scales, np.float32, shape)
        if self.zeros is not None:
            _check("zeros", self.zeros, np.int8, shape)
        if self.minimums is not None:
            _check("minimums", self.minimums, np.float32, shape)
        if self.order is not None:
            self._check_order(self.order)
        if self.bits not in _RANGES:
            raise WeightsError(f"bits must be 4, 5, 6 or 8, got {self.bits}")
        if self.table is not None:
            self._check_table(self.table)
            return
        least, largest = int(self.values.min()), int(self.values.max())
        if not any(low <= least and largest <= high for low, high in _RANGES[self.bits]):
            raise WeightsError(
                f"values of {self.bits} bits must be within "
                f"{' or '.join(f'[{low}, {high}]' for low, high in _RANGES[self.bits])}, got "
                f"{least} to {largest}"
            )

    def _check_order(self, order: npt.NDArray[np.int32]) -> None:
        columns = np.arange(self.in_features)
        if order.dtype != np.int32 or not np.array_equal(np.sort(order), columns):
            raise WeightsError(f"order must name each of {self.in_features} inputs once, in int32")

    def _check_table(self, table: tuple[int, ...]) -> None:
        if self.bits != 4 or len(table) != 16 or not -128 <= min(table) <= max(table) <= 127:
            raise WeightsError(
                f"table must have 16 numbers from -128 to 127, and bits be 4, got {table} and "
                f"{self.bits}"
            )
        is_there = np.zeros(256, np.bool_)
        is_there[np.array(table)] = True  # negative numbers index from the end, as their bits do
        if not is_there[self.values.view(np.uint8)].all():
            raise WeightsError(f"values must be in the table {table}")

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of groups in a row."""
        return -(-self.in_features // self.group_size)

    def rows(self, first: int, end: int) -> WeightIntegers:
        """Return rows `first` to `end` as views of these arrays.

        Raises ValueError for an empty range, or one past the rows.
        """
        if not 0 <= first < end <= self.out_features:
            raise ValueError(f"rows must lie in [0, {self.out_features}], got {first} to {end}")
        return WeightIntegers(
            self.values[first:end],
            self.scales[first:end],
            None if self.zeros is None else self.zeros[first:end],
            None if self.minimums is None else self.minimums[first:end],
            self.group_size,
            self.bits,
            self.table,
            self.order,
        )

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Compute the weight, float32 [out, in]."""
        weight = self.values.astype(np.float32)
        if self.zeros is not None:
            weight -= self._of_each_input(self.zeros.astype(np.float32))
        weight *= self._of_each_input(self.scales)
        if self.minimums is not None:
            weight += self._of_each_input(self.minimums)
        if self.order is None:
            return weight
        of_inputs = np.empty_like(weight)
        of_inputs[:, self.order] = weight
        return of_inputs

    def _of_each_input(self, of_groups: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.repeat(of_groups, self.group_size, axis=1)[:, : self.in_features]


def _check(name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int, int]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise WeightsError(
            f"{name} must be {np.dtype(dtype)} of shape {list(shape)}, got {_described(array)}"
        )


def _described(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
