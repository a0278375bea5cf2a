"""Weights of integers, and of codes of floats, with scales in groups, on CPUs.

They are filled row by row, and multiplied as integers, or as the floats that they stand for. Knows
arrays and their limits; `aioserve.models` knows the file formats that they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.native_types import NativeLinear, is_bfloat16

__all__ = ["CodedWeight", "GroupedWeight", "joined_linear", "permuted_linear"]


class GroupedWeight:
    """Weight `w[o, i] = values[o, i] * scales[o, g] + minimums[o, g]` with `g = i // group_size`.

    - bits: 8 for values from -128 to 127. 6, 5 or 4 for values from -32 to 31, -16 to 15 or -8 to
      7. With minimums, these have as many values from 0 on. 4 with a table of 16 numbers from -128
      to 127.
    - group_size: 16, 32, 64, a multiple of 128, or in_features.
    - dtype: float32 or bfloat16, for the rows that are multiplied, the bias, and the rows that
      `NativeLinear.rows` returns.
    - scales: storage of scales and minimums. With `"float32"` it takes any, with `"float16"` and
      `"bfloat16"` the numbers that these hold exactly. With `"multiples"`, as in k-quants, it takes
      int8 multiples of one number for every 256 inputs of a row.
    - has_zero_points: each minimum must be -(z * scale) with an integer z from -128 to 127, which
      is stored in its place. Not with `"multiples"`.
    - in_floats: rows of x stay floats. Results equal, to the bit, those of a `NativeLinear` of the
      floats that the weight stands for, rounded to `dtype`. These are `w` as above in float32, with
      the product rounded and then the sum, or (values - z) * scales, whose difference is exact.

    A smaller storage reads fewer bytes for every token, and the results are the same to the bit.

    Without in_floats, rows of x become int8, with a scale for each row and group of at most 128
    inputs. Products are integers, and scales meet them in float32 in the order of the groups. The
    equations are in `native/linear/grouped/tile.h`. All instruction sets and numbers of rows give
    the same bits. A row of x with a NaN or an infinity gives NaN.

    Raises:
        TypeError: another dtype.
        ValueError: sizes that don't fit, naming the argument and its limits.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        group_size: int,
        bits: int,
        table: Sequence[int] | None = None,
        has_minimums: bool = False,
        scales: Literal["float32", "float16", "bfloat16", "multiples"] = "float32",
        has_zero_points: bool = False,
        in_floats: bool = False,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        kernel = _native.DecodedWeight if in_floats else _native.GroupedWeight
        self.native: _native.GroupedWeight = kernel(
            out_features,
            in_features,
            group_size,
            bits,
            has_minimums,
            scales,
            has_zero_points,
            b"" if table is None else np.array(table, np.int8).tobytes(),
            is_bfloat16("dtype", dtype),
        )

    def set_rows(
        self,
        first: int,
        values: npt.NDArray[np.int8],
        scales: npt.NDArray[np.float32],
        minimums: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Set the rows from `first` on: values int8 [n, in], scales and minimums float32 [n,
        groups]. Any thread may set any rows.

        Raises IndexError for rows that don't exist. Raises ValueError for values that the bits
        don't hold, and for scales and minimums that wouldn't be stored exactly. Nothing is set
        then.
        """
        native = self.native
        if (minimums is not None) is not native.has_minimums:
            expected = "given" if native.has_minimums else "None"
            raise ValueError(f"minimums must be {expected} for has_minimums={native.has_minimums}")
        if values.ndim != 2:
            raise ValueError(f"values must be of shape [n, in_features], got {values.shape}")
        count = len(values)
        _check("values", values, np.int8, (count, native.in_features))
        _check("scales", scales, np.float32, (count, native.groups))
        minimums_at = 0
        if minimums is not None:
            _check("minimums", minimums, np.float32, (count, native.groups))
            minimums_at = minimums.ctypes.data
        native.set_rows(first, count, values.ctypes.data, scales.ctypes.data, minimums_at)

    def set_bias(self, bias: Tensor) -> None:
        """Set the bias [out_features], of the weight's dtype."""
        if bias.dtype is not self.dtype:
            raise TypeError(f"bias must be {self.dtype}, got {bias.dtype}")
        shape = (self.native.out_features,)
        if bias.shape != shape or not bias.is_cpu:
            raise ValueError(
                f"bias must be a CPU tensor of shape {list(shape)}, got {list(bias.shape)} on "
                f"{bias.device}"
            )
        bias = bias.detach().contiguous()
        self.native.set_bias(bias.data_ptr())

    def linear(self, out_dtype: torch.dtype | None = None) -> NativeLinear:
        """Return the layer. Rows may still be set while nothing is multiplied."""
        return NativeLinear.of_packed(self.native, out_dtype)


class CodedWeight(GroupedWeight):
    """Weight `w[o, i] = numbers[values[o, i]] * scales[o, i // group_size]`, in float32 and rounded
    to `dtype`. Results equal those of a `NativeLinear` of these floats, to the bit.

    - numbers: float32 [16], finite. None: those of E4M3 (float8_e4m3fn), whose codes have 8 bits
      and may
      not be NaN's.
    - values are the bytes of codes, as int8. Other arguments are those of `GroupedWeight`.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        group_size: int,
        numbers: npt.NDArray[np.float32] | None = None,
        scales: Literal["float32", "float16", "bfloat16", "multiples"] = "float32",
        dtype: torch.dtype,
    ) -> None:
        if numbers is not None:
            _check("numbers", numbers, np.float32, (16,))
        self.dtype = dtype
        self.native: _native.GroupedWeight = _native.DecodedWeight(
            out_features,
            in_features,
            group_size,
            scales,
            b"" if numbers is None else numbers.tobytes(),
            is_bfloat16("dtype", dtype),
        )


def joined_linear(
    layers: Sequence[NativeLinear], out_dtype: torch.dtype | None = None
) -> NativeLinear:
    """Return one layer whose outputs are those of `layers`, one after the other.

    Raises ValueError for no layers, and for layers that differ in in_features or dtype.
    """
    return NativeLinear.of_packed(
        _native.JoinedKernel(tuple(layer.packed for layer in layers)), out_dtype
    )


def permuted_linear(
    layer: NativeLinear, order: npt.NDArray[np.int32], out_dtype: torch.dtype | None = None
) -> NativeLinear:
    """Return a layer whose input order[i] is input i of `layer`.

    Raises ValueError unless `order` names each input once.
    """
    permuted = _native.PermutedKernel(layer.packed, np.ascontiguousarray(order).tobytes())
    return NativeLinear.of_packed(permuted, out_dtype)


def _check(name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
    if array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous of shape {list(shape)}, got {list(array.shape)} with "
            f"strides {array.strides}"
        )
