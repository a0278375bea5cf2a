"""Decodes stored weights into arrays, or into what `_native` packs, some blocks of rows at a time.

Plain floats that a file holds as they are wanted have a faster way, in C++. No torch here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve import _native
from aioserve.errors import WeightsError
from aioserve.models.stored import Floats, StoredLinear

__all__ = ["ARRAY_DTYPES", "Array", "Decoding"]

Array = npt.NDArray[Any]

ARRAY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}
"""Array dtype for the numbers of each: numpy has no bfloat16."""


class Decoding:
    """Decodes on as many threads as `_native` has, into floats of `dtype`.

    `stop` lets what runs in other threads end with WeightsError, soon.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def array(self, parts: Sequence[StoredLinear]) -> Array:
        """The weights, stacked along their rows: [rows, in]."""
        array = np.empty((_rows(parts), parts[0].in_features), ARRAY_DTYPES[self._dtype])

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            array[top + first : top + end] = rounded(part.floats(first, end), self._dtype)

        self._each_block(parts, fill)
        return array

    def packed(
        self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]
    ) -> _native.PackedWeight:
        """The weights, stacked along their rows, with their biases, as `_native` packs floats."""
        weight = self.array(parts)
        bias = self.array(biases) if biases else None
        rows, columns = weight.shape
        return _native.PackedWeight(
            weight.ctypes.data,
            rows,
            columns,
            weight.strides[0],
            weight.strides[1],
            0 if bias is None else bias.ctypes.data,
            self._dtype == "bfloat16",
        )

    def _each_block(
        self,
        parts: Sequence[StoredLinear],
        work: Callable[[StoredLinear, int, int, int], None],
    ) -> None:
        """`work(part, row above the part, first, end)` for blocks of all parts, on some threads."""

        def unless_stopped(part: StoredLinear, top: int, first: int, end: int) -> None:
            if self._stopped.is_set():
                raise WeightsError("reading was stopped")
            work(part, top, first, end)

        top, tasks = 0, []
        with ThreadPoolExecutor(_native.cpu_info()["threads"], "aioserve-decoding") as pool:
            for part in parts:
                tasks += [pool.submit(unless_stopped, part, top, *block) for block in part.blocks()]
                top += part.out_features
        for task in tasks:
            task.result()


def rounded(floats: Floats, dtype: str) -> Array:
    """The numbers in the array dtype of `dtype`, to nearest, ties to even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # becomes infinite, as in C++
            return floats.astype(ARRAY_DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(floats).view(np.uint32)
    upper = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    upper[np.isnan(floats)] = 0x7FC0
    return upper.astype(np.uint16).view(np.int16)


def _rows(parts: Sequence[StoredLinear]) -> int:
    return sum(part.out_features for part in parts)
