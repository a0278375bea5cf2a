"""Decoding of stored weights into arrays or `_native` kernels, block by block of rows.

Plain floats that need no decoding have a faster way, in C++. No torch here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve import _native
from aioserve.errors import WeightsError
from aioserve.formats.weights import PLAIN_FLOATS, ComputedFormats
from aioserve.models.stored import CodeForm, Floats, IntegerForm, StoredLinear
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import GROUP_SIZES, WeightIntegers

__all__ = ["ARRAY_DTYPES", "Array", "Decoding", "coded_rows", "integer_rows", "rounded"]

Array = npt.NDArray[Any]

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}
"""Array dtype for each dtype of floats. The bits of bfloat16, which numpy lacks, are int16."""


class Decoding:
    """Decoding on as many threads as `_native` has.

    Floats become `dtype`, in which kernels compute, too. Kernels keep integers and codes that
    `formats` has, and get all other weights as floats. `stop` makes work in other threads raise
    WeightsError soon.
    """

    def __init__(self, dtype: str, formats: ComputedFormats = PLAIN_FLOATS) -> None:
        self._dtype = dtype
        self._formats = formats
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def array(self, parts: Sequence[StoredLinear]) -> Array:
        """Decode weights, stacked along their rows, into an array [rows, in]."""
        array = np.empty((_rows(parts), parts[0].in_features), ARRAY_DTYPES[self._dtype])

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            array[top + first : top + end] = rounded(part.floats(first, end), self._dtype)

        self._each_block(parts, fill)
        return array

    def runs(self, parts: Sequence[StoredLinear]) -> list[list[StoredLinear]]:
        """Split the weights of a layer into runs. `kernel` makes one kernel of each run."""
        return [list(run) for _, run in groupby(parts, self._form_and_order)]

    def _form_and_order(self, part: StoredLinear) -> tuple[object, str]:
        """Key by which neighbouring weights share a kernel. Permuted weights get one each."""
        form = self._form(part)
        if isinstance(form, CodeForm):
            # Neighbours may share a kernel, however many outputs share their scales.
            return msgspec.structs.replace(form, alike=1), ""
        return form, part.name if form is not None and form.permuted else ""

    def _form(self, part: StoredLinear) -> IntegerForm | CodeForm | None:
        """Form of the integers or codes in the weight's kernel; None: it has floats."""
        integers, codes, formats = part.integers, part.codes, self._formats
        if codes is not None and formats.coded_floats:
            size, largest = codes.group_size, max(GROUP_SIZES)
            is_whole = size in GROUP_SIZES or size % largest == 0 or size >= part.in_features
            return codes if is_whole else None
        if integers is None or formats.held_bits(integers.bits) is None:
            return None
        if integers.permuted and formats.packed and not formats.integer_activations:
            return None  # kernels for floats add up inputs in order
        return integers

    def kernel(
        self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]
    ) -> _native.LinearKernel:
        """Make a `_native` kernel of weights, stacked along their rows, and their biases.

        Integers and codes keep their form. Runs of different forms get joined kernels."""
        bias = self.array(biases) if biases else None
        kernels: list[_native.LinearKernel] = []
        top = 0
        for run in self.runs(parts):
            end = top + _rows(run)
            own_bias = None if bias is None else np.ascontiguousarray(bias[top:end])
            form = self._form(run[0])
            if form is None:
                kernels.append(self._packed(run, own_bias))
            elif isinstance(form, CodeForm):
                kernels.append(self._coded(form, run, own_bias))
            else:
                kernels.append(self._grouped(form, run, own_bias))
            top = end
        return kernels[0] if len(kernels) == 1 else _native.JoinedKernel(tuple(kernels))

    def _packed(self, parts: Sequence[StoredLinear], bias: Array | None) -> _native.PackedWeight:
        weight = self.array(parts)
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

    def _grouped(
        self, form: IntegerForm, parts: Sequence[StoredLinear], bias: Array | None
    ) -> _native.LinearKernel:
        in_floats = not self._formats.integer_activations
        kernel = _native.DecodedWeight if in_floats else _native.GroupedWeight
        weight = kernel(
            _rows(parts),
            parts[0].in_features,
            form.group_size,
            form.bits,
            form.has_minimums,
            form.scales,
            form.has_zero_points,
            b"" if form.table is None else np.array(form.table, np.int8).tobytes(),
            self._dtype == "bfloat16",
        )

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            rows = _with_minimums(integer_rows(part, first, end))
            _set_rows(weight, part, top + first, *rows)

        self._each_block(parts, fill)
        if bias is not None:
            weight.set_bias(bias.ctypes.data)
        order = integer_rows(parts[0], 0, 1).order if form.permuted else None
        return weight if order is None else _native.PermutedKernel(weight, order.tobytes())

    def _coded(
        self, form: CodeForm, parts: Sequence[StoredLinear], bias: Array | None
    ) -> _native.LinearKernel:
        inputs = parts[0].in_features
        weight = _native.DecodedWeight(
            _rows(parts),
            inputs,
            min(form.group_size, inputs),
            form.scales,
            b"" if form.table is None else np.array(form.table, np.float32).tobytes(),
            self._dtype == "bfloat16",
        )

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            rows = coded_rows(part, first, end)
            codes, scales = np.ascontiguousarray(rows.codes), np.ascontiguousarray(rows.scales)
            _set_rows(weight, part, top + first, codes, scales, None)

        self._each_block(parts, fill)
        if bias is not None:
            weight.set_bias(bias.ctypes.data)
        return weight

    def _each_block(
        self,
        parts: Sequence[StoredLinear],
        work: Callable[[StoredLinear, int, int, int], None],
    ) -> None:
        """Call `work(part, rows of earlier parts, first, end)` for all blocks, on some threads."""

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


def integer_rows(part: StoredLinear, first: int, end: int) -> WeightIntegers:
    """Decode rows of a weight whose format has an `IntegerForm`. Raises `WeightsError`."""
    rows = part.rows(first, end)
    if not isinstance(rows, WeightIntegers):
        raise WeightsError(f"{part.name}: {part.format.name} must give integers")
    return rows


def coded_rows(part: StoredLinear, first: int, end: int) -> WeightCodes:
    """Decode rows of a weight whose format has a `CodeForm`. Raises `WeightsError`."""
    rows = part.rows(first, end)
    if not isinstance(rows, WeightCodes):
        raise WeightsError(f"{part.name}: {part.format.name} must give codes")
    return rows


def _set_rows(
    weight: _native.GroupedWeight,
    part: StoredLinear,
    first: int,
    values: Array,
    scales: Floats,
    minimums: Floats | None,
) -> None:
    minimums_at = 0 if minimums is None else minimums.ctypes.data
    try:
        weight.set_rows(first, len(values), values.ctypes.data, scales.ctypes.data, minimums_at)
    except ValueError as error:
        raise WeightsError(f"{part.name}: {error}") from error


def _with_minimums(rows: WeightIntegers) -> tuple[Array, Floats, Floats | None]:
    """Return values, scales and minimums as contiguous arrays.

    Zeros are merged into the minimums. With minimums, values of less than 8 bits start at 0."""
    values, zeros, minimums = rows.values, rows.zeros, rows.minimums
    if zeros is None and minimums is None:
        return np.ascontiguousarray(values), np.ascontiguousarray(rows.scales), None
    down = 0 if zeros is None else zeros.astype(np.float32)
    if rows.bits < 8 and rows.table is None and values.min() < 0:
        half = 1 << (rows.bits - 1)
        values, down = values + np.int8(half), down + np.float32(half)
    less = down * rows.scales
    minimums = -less if minimums is None else minimums - less
    scales = np.ascontiguousarray(rows.scales)
    return np.ascontiguousarray(values), scales, np.ascontiguousarray(minimums, np.float32)


def rounded(floats: Floats, dtype: str) -> Array:
    """Round to the array dtype of `dtype`, to nearest, ties to even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # becomes infinite, as in C++
            return floats.astype(ARRAY_DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(floats).view(np.uint32)
    upper = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    upper[np.isnan(floats)] = 0x7FC0
    return upper.astype(np.uint16).view(np.int16)


def _rows(parts: Sequence[StoredLinear]) -> int:
    return sum(part.out_features for part in parts)
