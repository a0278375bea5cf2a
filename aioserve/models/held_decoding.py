"""Decodes stored weights into what GPUs multiply as integers, in the host's memory.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.computed import FloatRows, GroupedRows, HeldLinear
from aioserve.models.decoding import Array, Decoding, integer_rows
from aioserve.models.grouped import GROUP_SIZES, GroupedIntegers
from aioserve.models.stored import Floats, IntegerForm, StoredLinear

__all__ = ["HeldDecoding"]


class HeldDecoding(Decoding):
    """`Decoding` for all backends, with those that take a `HeldLinear`."""

    def is_held(self, parts: Sequence[StoredLinear]) -> bool:
        """Whether a layer of these weights is a `HeldLinear`."""
        return not self._formats.packed and any(self._form(part) is not None for part in parts)

    def _form(self, part: StoredLinear) -> IntegerForm | None:
        form = part.integers
        if self._formats.packed or form is None:
            return super()._form(part)
        return None if form.permuted or self._formats.held_bits(form.bits) is None else form

    def held(self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]) -> HeldLinear:
        """The weights, stacked along their rows, with their biases: those that are integers as
        they are, each run of one form by itself."""
        bias = self.array(biases).reshape(-1) if biases else None
        runs: list[GroupedRows | FloatRows] = []
        top = 0
        for run in self.runs(parts):
            end = top + sum(part.out_features for part in run)
            own_bias = None if bias is None else bias[top:end]
            form = self._form(run[0])
            if form is None:
                runs.append(FloatRows(self.array(run), own_bias))
            else:
                runs.append(self._grouped_rows(form, run, own_bias))
            top = end
        return HeldLinear(self._dtype, parts[0].in_features, tuple(runs))

    def expected_sizes(
        self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]
    ) -> list[tuple[int, int]]:
        """`HeldLinear.sizes` of `held`, from the first row of each run. Scales of other rows may
        take more bytes."""
        sizes: list[tuple[int, int]] = []
        for run in self.runs(parts):
            outputs = sum(part.out_features for part in run)
            row = self.held([run[0].sliced(0, 1)], [bias.sliced(0, 1) for bias in biases[:1]])
            sizes.append((outputs, outputs * row.runs[0].num_bytes))
        return sizes

    def _grouped_rows(
        self, form: IntegerForm, parts: Sequence[StoredLinear], bias: Array | None
    ) -> GroupedRows:
        # One row tells which of the two a format has.
        firsts = [integer_rows(part, 0, 1) for part in parts] if form.has_minimums else []
        has_zeros = any(first.zeros is not None for first in firsts)
        has_minimums = any(first.minimums is not None for first in firsts)
        outputs, inputs = sum(part.out_features for part in parts), parts[0].in_features
        chunk = form.group_size if form.group_size in GROUP_SIZES else max(GROUP_SIZES)
        chunks, groups = -(-inputs // chunk), -(-inputs // form.group_size)
        # Numbers of a table are what 8 bits hold.
        bits = self._formats.held_bits(form.bits if form.table is None else 8) or 8
        offset = 8 if bits == 4 and not has_minimums else 0
        kind = np.uint8 if bits == 4 else np.int8
        values = np.empty((chunks, outputs, chunk * bits // 8), kind)
        scales = np.empty((groups, outputs), np.float32)
        zeros = np.zeros((groups, outputs), np.int8) if has_zeros else None
        minimums = np.zeros((groups, outputs), np.float32) if has_minimums else None

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            rows, at = integer_rows(part, first, end), slice(top + first, top + end)
            stored, own_zeros, least = rows.values, rows.zeros, rows.minimums
            if bits == 4:
                stored, own_zeros, least = _from_zero_on(part, rows, offset)
            padded = np.zeros((len(stored), chunks * chunk), np.int8)
            padded[:, :inputs] = stored
            in_chunks = padded.reshape(len(padded), chunks, chunk).transpose(1, 0, 2)
            values[:, at] = _in_halves(in_chunks) if bits == 4 else in_chunks
            scales[:, at] = rows.scales.T
            if zeros is not None and own_zeros is not None:
                zeros[:, at] = own_zeros.T
            if minimums is not None and least is not None:
                minimums[:, at] = least.T

        self._each_block(parts, fill)
        return GroupedRows(
            values,
            _narrowed(scales),
            zeros,
            None if minimums is None else _narrowed(minimums),
            bias,
            bits,
            chunk,
            offset,
            form.integer_activations and self._formats.integer_activations,
        )


def _from_zero_on(
    part: StoredLinear, rows: GroupedIntegers, offset: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8] | None, Floats | None]:
    """Values, zeros and minimums of the same weights with values from 0 to 15, less by `offset`."""
    values, zeros, minimums = rows.values, rows.zeros, rows.minimums
    if minimums is not None and not offset and values.min() < 0:
        values, minimums = values + np.int8(8), minimums - 8 * rows.scales
    elif zeros is not None and offset and values.max() > 7:
        zeros = zeros - np.int8(offset)
    else:
        values = values + np.int8(offset)
    if values.min() < 0 or values.max() > 15 or (zeros is not None and zeros.min() < -64):
        raise WeightsError(
            f"{part.name}: values of 4 bits must be within [-8, 7], or within [0, 15] where there "
            f"are zeros or minimums, got {rows.values.min()} to {rows.values.max()}"
        )
    return values, zeros, minimums


def _in_halves(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    return (values[..., 0::2] | values[..., 1::2] << 4).view(np.uint8)


def _narrowed(numbers: Floats) -> npt.NDArray[Any]:
    """The numbers in two bytes where those hold all of them exactly: as float16, or the bits of
    bfloat16 in int16."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float16)
    if np.array_equal(narrow.astype(np.float32), numbers, equal_nan=True):
        return narrow
    bits = numbers.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return (bits >> 16).astype(np.uint16).view(np.int16)
    return numbers
