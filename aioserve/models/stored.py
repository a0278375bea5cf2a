"""Descriptions of stored weights: the tensors in files that make up a weight, and their format.

A description can be sliced by rows, and reads a range of rows only on request. Files are read, not
mapped: a file that ends early raises an error, where a mapping would kill the process. No torch
here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve import _native
from aioserve.errors import WeightsError
from aioserve.models.architecture import Tensor
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import Scales, WeightIntegers

__all__ = [
    "PLAIN",
    "SCALES_OF_DTYPE",
    "CodeForm",
    "Floats",
    "Format",
    "IntegerForm",
    "Plain",
    "Rows",
    "StoredLinear",
    "StoredTensor",
    "StoredWeights",
    "same_bits",
    "source_of",
]

Floats = npt.NDArray[np.float32]
Rows = WeightIntegers | WeightCodes | Floats
"""Rows of a weight, [rows, in]."""

BLOCK_VALUES = 1 << 17
"""Number of a weight's values that are decoded at once, so that their floats fit into caches."""

LEAST_UNUSABLE = np.float32(2.0**56)
"""Limit that every scale and every number of a weight stays below, in magnitude.

Norms square the products in float32."""

_NUMPY_DTYPES: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
"""Array dtype for each dtype of safetensors. Unsigned integers hold the bits if numpy lacks it."""


class StoredTensor(msgspec.Struct, frozen=True):
    """Tensor in an open file, stored row by row."""

    path: Path
    name: str
    file: int
    """File descriptor."""
    offset: int
    """Offset of its first byte in the file."""
    num_bytes: int
    dtype: str
    """Dtype as safetensors files spell it: F32, BF16, I64."""
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.path}: {self.name}"

    def along_first_axis(self) -> Iterator[StoredTensor]:
        """Yield the tensors stacked along its first axis."""
        count = self.shape[0]
        size = self.num_bytes // count
        for i in range(count):
            yield msgspec.structs.replace(
                self,
                name=f"{self.name}[{i}]",
                offset=self.offset + i * size,
                num_bytes=size,
                shape=self.shape[1:],
            )

    def read(self, first: int = 0, end: int | None = None) -> npt.NDArray[Any]:
        """Read rows `first` to `end` along the first axis, in the stored dtype.

        For dtypes that numpy lacks, the array holds the bits. A tensor without axes has one row and
        gives shape [1]."""
        shape = self.shape or (1,)
        end = shape[0] if end is None else end
        array = np.empty((end - first, *shape[1:]), self._numpy_dtype)
        self._read_into(array, first * (array.nbytes // max(end - first, 1)))
        return array

    def read_columns(self, first: int, end: int) -> npt.NDArray[Any]:
        """Read columns `first` to `end` of all rows of a tensor with two axes."""
        rows, columns = self.shape
        array = np.empty((rows, end - first), self._numpy_dtype)
        for row in range(rows):
            self._read_into(array[row], (row * columns + first) * array.itemsize)
        return array

    def read_bytes(self, at: int, count: int) -> npt.NDArray[np.uint8]:
        """Read `count` bytes, starting at byte `at` of the tensor."""
        array = np.empty(count, np.uint8)
        self._read_into(array, at)
        return array

    def read_floats(self, first: int = 0, end: int | None = None) -> Floats:
        """`read`, converted to float32. Raises `WeightsError` for a tensor of integers."""
        return as_float32(self.read(first, end), self)

    def read_float_columns(self, first: int, end: int) -> Floats:
        """`read_columns`, converted to float32. Raises `WeightsError` for a tensor of integers."""
        return as_float32(self.read_columns(first, end), self)

    @property
    def _numpy_dtype(self) -> type:
        dtype = _NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise WeightsError(f"{self.label} has dtype {self.dtype}, which can't be loaded")
        return dtype

    def _read_into(self, array: npt.NDArray[Any], at: int) -> None:
        left = array.data.cast("B")
        while left:
            try:
                got = os.preadv(self.file, [left], self.offset + at)
            except OSError as error:
                raise WeightsError(f"{self.label} can't be read: {error.strerror}") from error
            if not got:
                raise WeightsError(f"{self.label} can't be read: the file ends early")
            left, at = left[got:], at + got


def as_float32(array: npt.NDArray[Any], stored: StoredTensor) -> Floats:
    """Convert an array that was read from `stored` to float32."""
    if stored.dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if stored.dtype not in ("F64", "F32", "F16"):
        raise WeightsError(f"{stored.label} must hold floats, has dtype {stored.dtype}")
    return array.astype(np.float32, copy=False)


PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the plain formats by the dtypes of safetensors."""


SCALES_OF_DTYPE: Mapping[str, Scales] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Kinds of scales by the dtypes of safetensors."""


class IntegerForm(msgspec.Struct, frozen=True):
    """Sizes and kinds of the `WeightIntegers` that a format decodes to."""

    bits: int
    group_size: int
    has_minimums: bool
    """True if groups have zeros or minimums."""
    scales: Scales = "float32"
    has_zero_points: bool = False
    """True if groups have zeros, which are integers, instead of minimums of the kind `scales`."""
    table: tuple[int, ...] | None = None
    """The 16 numbers that values are among; None: any numbers of `bits` bits."""
    permuted: bool = False
    """True if columns are in another order than the inputs."""
    integer_activations: bool = False
    """True if the checkpoint expects multiplied rows to become int8.

    CPUs round rows in any case, since they multiply only integers. GPUs keep rows as floats unless
    this is set."""


class CodeForm(msgspec.Struct, frozen=True):
    """Sizes and kinds of the `WeightCodes` that a format decodes to."""

    group_size: int
    table: tuple[float, ...] | None = None
    """The 16 numbers that codes stand for, exact in float32; None: codes are E4M3."""
    scales: Scales = "float32"
    """Kind of the scales."""
    alike: int = 1
    """Number of neighbouring outputs that share scales, counted from the weight's first output."""
    float_activations: bool = False
    """True if the checkpoint expects multiplied rows to become E4M3."""


class Format(ABC):
    """Rule that turns the parts of a weight into its numbers. A frozen value."""

    least_rows: ClassVar[int] = 1
    """Fewest rows that are decoded at once.

    Above 1 if a part spreads a row's numbers out, so that each of them takes a read of its own."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in messages, descriptions and cache keys.

        It contains every setting that the meaning of the bits depends on."""

    @property
    def title(self) -> str:
        """Name for people, without details of a single tensor."""
        return self.name

    @abstractmethod
    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        """Form of the `WeightIntegers` that `rows` returns; None: it returns another type.

        Does not read the file."""

    def codes(self, stored: StoredLinear) -> CodeForm | None:
        """Form of the `WeightCodes` that `rows` returns; None: it returns another type.

        Does not read the file."""
        return None

    @abstractmethod
    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        """Decode rows `first` to `end` of the weight, counted from the first row of its parts.

        May be called by any thread. Raises `WeightsError`."""


@dataclass(frozen=True, slots=True)
class Plain(Format):
    """Unquantised floats in one part, "weight"."""

    dtype: str
    """float32, bfloat16 or float16."""
    transposed: bool = False
    """True if the weight is stored as [in, out]."""

    @property
    def name(self) -> str:
        return self.dtype

    def integers(self, stored: StoredLinear) -> None:
        return None

    def rows(self, stored: StoredLinear, first: int, end: int) -> Floats:
        weight = stored.parts["weight"]
        if self.transposed:
            columns = as_float32(weight.read_columns(first, end), weight)
            return np.ascontiguousarray(columns.T)
        return weight.read_floats(first, end).reshape(end - first, stored.in_features)


@dataclass(frozen=True, slots=True, eq=False)
class StoredLinear:
    """One weight [out_features, in_features] in files, or a range of its rows.

    - parts: the whole tensors that make it up, by names that the format knows.
    - group_size: number of inputs that share a scale, or 0 without scales.

    A vector is a weight with one input.
    """

    format: Format
    parts: Mapping[str, StoredTensor]
    out_features: int
    in_features: int
    group_size: int = 0
    first_row: int = 0
    """Index of its first row in `parts`."""

    @property
    def name(self) -> str:
        return next(iter(self.parts.values())).label

    @property
    def num_bytes(self) -> int:
        """Bytes of its whole parts in the files."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def integers(self) -> IntegerForm | None:
        """Form of the integers that `rows` returns; None: it returns another type."""
        return self.format.integers(self)

    @property
    def codes(self) -> CodeForm | None:
        """Form of the coded floats that `rows` returns; None: it returns another type."""
        return self.format.codes(self)

    def sliced(self, first: int, end: int) -> StoredLinear:
        """Describe rows `first` to `end`. Raises ValueError for a range past its rows."""
        if not 0 <= first < end <= self.out_features:
            raise ValueError(f"rows must lie in [0, {self.out_features}], got {first} to {end}")
        return replace(self, out_features=end - first, first_row=self.first_row + first)

    def rows(self, first: int = 0, end: int | None = None) -> Rows:
        """Read and decode rows `first` to `end`.

        Raises `WeightsError` naming file and tensor if they can't be read. Unless the format is
        plain, it also refuses scales and numbers that reach `LEAST_UNUSABLE` or are not finite."""
        end = self.out_features if end is None else end
        if not 0 <= first < end <= self.out_features:
            raise ValueError(f"rows must lie in [0, {self.out_features}], got {first} to {end}")
        with np.errstate(over="ignore", invalid="ignore"):  # `_check` finds the results
            rows = self.format.rows(self, self.first_row + first, self.first_row + end)
        if not isinstance(self.format, Plain):
            self._check(rows, self.first_row + first)
        return rows

    def _check(self, rows: Rows, first: int) -> None:
        """Raise `WeightsError` for unusable numbers: in logits, they would not name the tensor."""
        found: list[tuple[str, Floats]] = [("number", rows)] if isinstance(rows, np.ndarray) else []
        if isinstance(rows, WeightCodes) and not rows.is_below(LEAST_UNUSABLE):
            with np.errstate(over="ignore", invalid="ignore"):
                found = [("scale", rows.scales), ("number", rows.dequantized())]
        elif isinstance(rows, WeightIntegers):
            found = [("scale", rows.scales)]
            found += [] if rows.minimums is None else [("minimum", rows.minimums)]
        for what, numbers in found:
            if numbers.max() < LEAST_UNUSABLE and numbers.min() > -LEAST_UNUSABLE:
                continue
            row, column = np.argwhere(~(np.abs(numbers) < LEAST_UNUSABLE))[0]
            label = self.parts["scales"].label if "scales" in self.parts else self.name
            raise WeightsError(
                f"{label}: row {first + row} of the weight has the {what} "
                f"{numbers[row, column]:g}, must be within {LEAST_UNUSABLE:g}"
            )

    def floats(self, first: int = 0, end: int | None = None) -> Floats:
        """`rows`, converted to float32."""
        rows = self.rows(first, end)
        return rows if isinstance(rows, np.ndarray) else rows.dequantized()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows to decode at once, in ascending order."""
        step = max(self.format.least_rows, BLOCK_VALUES // self.in_features)
        for first in range(0, self.out_features, step):
            yield first, min(first + step, self.out_features)


def source_of(stored: StoredLinear, rows: int) -> _native.WeightSource:
    """Describe `rows` rows of a plain weight to the C++ reader, which needs its file open."""
    weight = stored.parts["weight"]
    return _native.WeightSource(weight.file, weight.offset, rows, PLAIN[weight.dtype], weight.label)


def same_bits(one: StoredLinear, other: StoredLinear) -> bool:
    """True if two weights of equal shape have the same format and the same bits. Reads both.

    Raises `WeightsError` if they can't be read.
    """
    if one.format != other.format:
        return False
    try:
        return all(_same_bytes(part, other.parts[name]) for name, part in one.parts.items())
    except RuntimeError as error:
        raise WeightsError(str(error)) from error


def _same_bytes(*pair: StoredTensor) -> bool:
    one, other = pair
    if one.num_bytes != other.num_bytes:
        return False
    # Any dtype will do, since only bytes are compared.
    a, b = (_native.WeightSource(p.file, p.offset, 1, "float32", p.label) for p in pair)
    return _native.same_bytes(a, b, one.num_bytes)


class StoredWeights(ABC):
    """Weights of one model in open files, from `ModelFiles.weights`. A context manager.

    Its creation makes all checks that need no tensor's contents. It finds tensors that are missing,
    left over, of the wrong shape or of an unknown format.
    """

    total_bytes: int
    """Bytes in the files of all tensors that the model uses."""
    dtype: str
    """Dtype to compute in, by the files: float32, bfloat16 or float16."""

    @abstractmethod
    def __contains__(self, tensor: Tensor) -> bool: ...

    @abstractmethod
    def __getitem__(self, tensor: Tensor) -> StoredLinear:
        """Describe a tensor in the files. Its first axis becomes the rows."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Their descriptions can no longer be read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
