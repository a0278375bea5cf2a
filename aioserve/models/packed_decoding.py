"""Decoding of stored weights into the integers or float codes that GPUs multiply.

The results are in the host's memory. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.formats.weights import FloatRows, GroupedRows, PackedLinear
from aioserve.models.decoding import Array, Decoding, coded_rows, integer_rows
from aioserve.models.stored import CodeForm, Floats, IntegerForm, StoredLinear
from aioserve.models.weight_integers import GROUP_SIZES, WeightIntegers

__all__ = ["PackedDecoding"]

_UNIT_INPUTS = 256
"""Number of inputs whose scales share a unit in forms with scales of the kind "multiples"."""


class _Chunks(NamedTuple):
    """Division of a row's inputs into chunks and groups."""

    chunk: int
    count: int
    groups: int
    repeat: int
    """Number of chunks in a group."""

    @classmethod
    def of(cls, inputs: int, group_size: int) -> _Chunks:
        chunk = group_size if group_size in GROUP_SIZES else max(GROUP_SIZES)
        groups = -(-inputs // group_size)
        return cls(chunk, -(-inputs // chunk), groups, -(-group_size // chunk))

    def of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reshape values [rows, inputs] to [chunks, rows, chunk], zero past the last input."""
        padded = np.zeros((len(values), self.count * self.chunk), values.dtype)
        padded[:, : values.shape[1]] = values
        return padded.reshape(len(values), self.count, self.chunk).transpose(1, 0, 2)


class _GroupNumbers:
    """Scales or minimums, [groups, outputs].

    With `unit_groups` they are int8 multiples of a unit, which that many groups share. Otherwise
    they are float32, which `held` narrows."""

    def __init__(self, groups: int, outputs: int, unit_groups: int) -> None:
        self._numbers: npt.NDArray[Any] = np.zeros(
            (groups, outputs), np.int8 if unit_groups else np.float32
        )
        self._unit_groups = unit_groups
        self.units: Floats | None = None
        if unit_groups:
            self.units = np.zeros((-(-groups // unit_groups), outputs), np.float32)

    def set(self, part: StoredLinear, at: slice, numbers: Floats) -> None:
        """Set the numbers [groups, outputs] of outputs `at`, which `part` has."""
        if self.units is None:
            self._numbers[:, at] = numbers
            return
        found = _multiples(numbers, self._unit_groups)
        if found is None:
            raise WeightsError(
                f"{part.name}: scales and minimums must be multiples, by -128 to 127, of one "
                f"number for {_UNIT_INPUTS} inputs"
            )
        self._numbers[:, at], self.units[:, at] = found

    def held(self) -> npt.NDArray[Any]:
        return self._numbers if self._unit_groups else _narrowed(self._numbers)


class PackedDecoding(Decoding):
    """`Decoding` that also makes `PackedLinear` for the backends that take it."""

    def is_held(self, parts: Sequence[StoredLinear]) -> bool:
        """True if a layer of these weights becomes a `PackedLinear`."""
        return not self._formats.packed and any(map(self._form, parts))

    def held(self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]) -> PackedLinear:
        """Make a `PackedLinear` of weights, stacked along their rows, and their biases.

        Integers and codes keep their form; each run of one form is a run of the result."""
        bias = self.array(biases).reshape(-1) if biases else None
        runs: list[GroupedRows | FloatRows] = []
        top = 0
        for run in self.runs(parts):
            end = top + sum(part.out_features for part in run)
            own_bias = None if bias is None else bias[top:end]
            form = self._form(run[0])
            if form is None:
                runs.append(FloatRows(self.array(run), own_bias))
            elif isinstance(form, CodeForm):
                runs.append(self._coded_rows(form, run, own_bias))
            else:
                runs.append(self._grouped_rows(form, run, own_bias))
            top = end
        return PackedLinear(self._dtype, parts[0].in_features, tuple(runs))

    def expected_sizes(
        self, parts: Sequence[StoredLinear], biases: Sequence[StoredLinear]
    ) -> list[tuple[int, int]]:
        """Predict `PackedLinear.sizes` of `held` from the first row of each run.

        Scales of other rows may take more bytes."""
        sizes: list[tuple[int, int]] = []
        for run in self.runs(parts):
            outputs = sum(part.out_features for part in run)
            row = self.held([run[0].sliced(0, 1)], [bias.sliced(0, 1) for bias in biases[:1]])
            sizes.append((outputs, _bytes_of(row.runs[0], outputs, run)))
        return sizes

    def _grouped_rows(
        self, form: IntegerForm, parts: Sequence[StoredLinear], bias: Array | None
    ) -> GroupedRows:
        # The form does not tell zeros from minimums; one row of each part does.
        firsts = [integer_rows(part, 0, 1) for part in parts] if form.has_minimums else []
        has_zeros = any(first.zeros is not None for first in firsts)
        has_minimums = any(first.minimums is not None for first in firsts)
        outputs = sum(part.out_features for part in parts)
        chunks = _Chunks.of(parts[0].in_features, form.group_size)
        bits = self._formats.held_bits(form.bits) or 8
        places = None if form.table is None else _places(form.table)
        offset = 8 if bits == 4 and not has_minimums and places is None else 0
        kind = np.uint8 if bits == 4 else np.int8
        values = np.empty((chunks.count, outputs, chunks.chunk * bits // 8), kind)
        unit_groups = _UNIT_INPUTS // form.group_size if form.scales == "multiples" else 0
        sizes = chunks.groups, outputs, unit_groups
        scales = _GroupNumbers(*sizes)
        zeros = np.zeros((chunks.groups, outputs), np.int8) if has_zeros else None
        minimums = _GroupNumbers(*sizes) if has_minimums else None

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            rows, at = integer_rows(part, first, end), slice(top + first, top + end)
            stored, own_zeros, least = rows.values, rows.zeros, rows.minimums
            if places is not None:
                stored = places[stored.view(np.uint8)]
            elif bits == 4:
                stored, own_zeros, least = _from_zero_on(part, rows, offset)
            in_chunks = chunks.of_rows(stored)
            values[:, at] = _in_halves(in_chunks) if bits == 4 else in_chunks
            scales.set(part, at, rows.scales.T)
            if zeros is not None and own_zeros is not None:
                zeros[:, at] = own_zeros.T
            if minimums is not None and least is not None:
                minimums.set(part, at, least.T)

        self._each_block(parts, fill)
        return GroupedRows(
            values,
            scales.held(),
            zeros,
            None if minimums is None else minimums.held(),
            bias,
            bits,
            chunks.chunk,
            chunks.repeat,
            offset,
            form.integer_activations and self._formats.integer_activations and places is None,
            "integers" if places is None else "chosen",
            None if form.table is None else np.array(form.table, np.float32),
            order=integer_rows(parts[0], 0, 1).order if form.permuted else None,
            scale_units=scales.units,
            minimum_units=None if minimums is None else minimums.units,
            unit_chunks=unit_groups * chunks.repeat,
        )

    def _coded_rows(
        self, form: CodeForm, parts: Sequence[StoredLinear], bias: Array | None
    ) -> GroupedRows:
        outputs, alike = sum(part.out_features for part in parts), _alike(parts)
        chunks = _Chunks.of(parts[0].in_features, form.group_size)
        bits = 8 if form.table is None else 4
        values = np.empty((chunks.count, outputs, chunks.chunk * bits // 8), np.uint8)
        scales = np.empty((chunks.groups, -(-outputs // alike)), np.float32)

        def fill(part: StoredLinear, top: int, first: int, end: int) -> None:
            rows = coded_rows(part, first, end)
            in_chunks = chunks.of_rows(rows.codes)
            values[:, top + first : top + end] = _in_halves(in_chunks) if bits == 4 else in_chunks
            blocks = np.arange((top + first) // alike, -(-(top + end) // alike))
            scales[:, blocks] = rows.scales[np.maximum(blocks * alike - top - first, 0)].T

        self._each_block(parts, fill)
        return GroupedRows(
            values,
            _narrowed(scales),
            None,
            None,
            bias,
            bits,
            chunks.chunk,
            chunks.repeat,
            0,
            form.float_activations and self._formats.integer_activations,
            "e4m3" if form.table is None else "table",
            None if form.table is None else np.array(form.table, np.float32),
            alike,
        )


def _places(table: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Place of each integer in a table, indexed by the bits of its int8: uint8 [256]."""
    places = np.zeros(256, np.uint8)
    places[np.array(table)] = np.arange(len(table))  # negative numbers index from the end
    return places


def _alike(parts: Sequence[StoredLinear]) -> int:
    """Number of neighbouring outputs that share scales, counted from the first of all outputs."""
    alike = top = 0
    for part in parts:
        own = 1 if part.codes is None else part.codes.alike
        alike = math.gcd(alike, own, top, part.first_row)
        top += part.out_features
    return alike


def _bytes_of(row: GroupedRows | FloatRows, outputs: int, parts: Sequence[StoredLinear]) -> int:
    """Bytes of `outputs` rows of the parts, computed from one `row`."""
    if isinstance(row, FloatRows):
        return outputs * row.num_bytes
    scales, shared = row.scales.nbytes, row.shared_bytes
    own = row.num_bytes - scales - shared
    return outputs * own + -(-outputs // _alike(parts)) * scales + shared


def _from_zero_on(
    part: StoredLinear, rows: WeightIntegers, offset: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8] | None, Floats | None]:
    """Shift 4-bit values to 0 to 15, where weights subtract `offset` from them.

    Returns values, zeros and minimums of the same weights."""
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


def _in_halves(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return (values[..., 0::2] | values[..., 1::2] << 4).view(np.uint8)


def _multiples(numbers: Floats, unit_groups: int) -> tuple[npt.NDArray[np.int8], Floats] | None:
    """Split numbers [groups, outputs] into int8 multiples and units, float32 [units, outputs].

    Each unit belongs to `unit_groups` groups, and is the greatest number that all of theirs are
    multiples of. It is negative if a multiple would otherwise be 128. None if the numbers can't be
    split exactly."""
    groups, outputs = numbers.shape
    count = -(-groups // unit_groups)
    padded = np.zeros((count * unit_groups, outputs), np.float32)
    padded[:groups] = numbers
    fraction, exponent = np.frexp(padded.reshape(count, unit_groups, outputs))
    whole = np.ldexp(fraction, 24).astype(np.int64)
    lowest = np.where(whole == 0, np.iinfo(np.int16).max, exponent).min(axis=1, keepdims=True)
    shift = np.where(whole == 0, 0, exponent - lowest)
    if shift.max() > 32:
        return None
    whole <<= shift
    step = np.gcd.reduce(whole, axis=1, keepdims=True)
    step = np.where(whole.max(axis=1, keepdims=True) > 127 * step, -step, step)
    found = whole // np.where(step == 0, 1, step)
    if found.min() < -128 or found.max() > 127:
        return None
    units = np.ldexp(step.astype(np.float64), np.where(step == 0, 0, lowest - 24))
    multiples = found.reshape(-1, outputs)[:groups].astype(np.int8)
    return multiples, units.reshape(count, outputs).astype(np.float32)


def _narrowed(numbers: Floats) -> npt.NDArray[Any]:
    """Narrow numbers to two bytes if all of them stay exact, else return them unchanged.

    They become float16, or int16 with the bits of bfloat16."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float16)
    if np.array_equal(narrow.astype(np.float32), numbers, equal_nan=True):
        return narrow
    bits = numbers.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return (bits >> 16).astype(np.uint16).view(np.int16)
    return numbers
