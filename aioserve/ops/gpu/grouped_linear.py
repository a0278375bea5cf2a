# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportArgumentType=false
"""Linear layers of small numbers with scales in groups, on a GPU: what is launched, and how large.

A row's result has the same bits whatever number of rows is multiplied with it. What is chosen here
by the number of rows changes the time alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aioserve.formats.weights import Code, FloatRows, GroupedRows, HeldLinear
from aioserve.ops.gpu.grouped_kernels import (
    linear_kernel,
    merge_kernel,
    quantize_kernel,
    rows_kernel,
    sums_kernel,
)
from aioserve.ops.linear import Linear

__all__ = [
    "FloatRun",
    "GroupedLinear",
    "GroupedRun",
    "Layout",
    "Numbers",
    "Tile",
    "multiplies_e4m3",
    "parts_of",
    "tile_of",
]

_PROGRAMS = 256
"""Programs that keep a device busy: about two for each multiprocessor of an H100 or B200."""
_MOST_PARTS = 16
_PART_INPUTS = 256
"""The fewest in a part."""
_SPLIT_ROWS = 64
"""With more rows, tiles of them are many: parts needn't be programs of their own."""
_MERGED = 1024
"""Outputs of a row that one program merges."""
_PREPARED = 1024
"""Inputs of a row that one program sums or rounds."""
MIN_ROUNDED_CHUNK = 32
"""Inputs of a chunk that tensor cores take as int8 or E4M3; rows stay floats where there are
fewer."""
_E4M3_CAPABILITY = (8, 9)
"""Compute capability from which tensor cores multiply E4M3."""


_E4M3 = torch.float8_e4m3fn


class Tile(NamedTuple):
    """Tile that one program computes, and options of its compilation."""

    outputs: int
    rows: int
    warps: int
    stages: int


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """For so many rows, which tensor cores multiply as columns: 16 are the fewest they take. IEEE
    products of float32 don't run on them, and have their operands in registers."""
    if dtype is torch.float32:
        return Tile(32, 16, 4, 2)
    if rows <= 32:
        return Tile(64, 16 if rows <= 16 else 32, 4, 4)
    return Tile(64, 64, 8, 4)


def parts_of(out_features: int, chunks: int, chunk: int) -> int:
    """Chunks in a part of the inputs: as few as let one row fill a device. The sums of all rows are
    taken by parts, so nothing but the layer's shape may decide it."""
    wanted = max(1, min(_MOST_PARTS, _PROGRAMS // -(-out_features // 64)))
    return max(-(-chunks // wanted), -(-_PART_INPUTS // chunk))


def multiplies_e4m3(device: torch.device) -> bool:
    """Whether tensor cores of the device do; Triton's interpreter does."""
    is_interpreted = device.type == "cpu"
    return is_interpreted or torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


class Numbers(NamedTuple):
    """What `GroupedRows` says of rows, on the device. Several experts have an axis before all
    others."""

    values: Tensor
    table: Tensor | None
    scales: Tensor
    scale_units: Tensor | None
    zeros: Tensor | None
    minimums: Tensor | None
    minimum_units: Tensor | None
    bias: Tensor | None
    order: Tensor | None

    @classmethod
    def of(cls, rows: GroupedRows, dtype: torch.dtype, on: torch.device) -> Numbers:
        """`dtype`: that of the bias."""

        def uploaded(numbers: npt.NDArray[Any] | None) -> Tensor | None:
            return None if numbers is None else _uploaded(numbers, on)

        return cls(
            _uploaded(rows.values, on),
            uploaded(rows.table),
            _uploaded(rows.scales, on),
            uploaded(rows.scale_units),
            uploaded(rows.zeros),
            uploaded(rows.minimums),
            uploaded(rows.minimum_units),
            None if rows.bias is None else torch.from_numpy(rows.bias).to(on).view(dtype),
            uploaded(rows.order),
        )

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """From the table to the units of minimums. Kernels don't read what isn't there."""
        return tuple(self.scales if one is None else one for one in self[1:7])

    def values_for(self, x: Tensor) -> Tensor:
        """The values as kernels take them beside such rows."""
        return self.values.view(x.dtype) if x.dtype is _E4M3 else self.values


class Layout(NamedTuple):
    """How the numbers of rows lie, beside what their shapes and dtypes say."""

    code: Code
    bits: int
    offset: int
    chunk: int
    chunks: int
    repeat: int
    alike: int
    unit_chunks: int
    rounds: bool
    """Whether rows that are multiplied become int8, or E4M3."""

    @classmethod
    def of(cls, rows: GroupedRows, on: torch.device) -> Layout:
        rounds = rows.rounded_activations and rows.chunk >= MIN_ROUNDED_CHUNK
        return cls(
            rows.code,
            rows.bits,
            rows.offset,
            rows.chunk,
            rows.values.shape[0],
            rows.repeat,
            rows.alike,
            rows.unit_chunks,
            rounds and (rows.code != "e4m3" or multiplies_e4m3(on)),
        )


class Prepared(NamedTuple):
    """Rows as a kernel takes them; the rows again in place of what isn't needed."""

    x: Tensor
    scales: Tensor
    """float32 [rows, chunks]."""
    sums: Tensor
    """[rows, chunks]."""


class GroupedRun:
    """Rows of small numbers on the device."""

    def __init__(self, rows: GroupedRows, in_features: int, dtype: torch.dtype, on: torch.device):
        self.out_features: int = rows.out_features
        self.in_features: int = in_features
        self.numbers: Numbers = Numbers.of(rows, dtype, on)
        self.layout: Layout = Layout.of(rows, on)
        self._dtype = dtype
        chunks, chunk = self.layout.chunks, rows.chunk
        part_chunks = parts_of(self.out_features, chunks, chunk)
        self._parts = -(-chunks // part_chunks)
        self.sizes: tuple[int, ...] = (
            *(chunks, part_chunks, rows.repeat, rows.alike, rows.scales.shape[1]),
        )
        """`chunks` and what follows it, as the kernels' arguments."""
        self._constants: dict[str, Any] = {
            "CODE": rows.code,
            "BITS": rows.bits,
            "OFFSET": rows.offset,
            "CHUNK": chunk,
            "UNIT_CHUNKS": rows.unit_chunks,
            "HAS_ZEROS": rows.zeros is not None,
            "HAS_MINIMUMS": rows.minimums is not None,
        }
        self.constants: dict[str, Any] = {
            **self._constants,
            "WHOLE": in_features % chunk == 0,
            "ROUNDED": self.layout.rounds,
        }
        """Constants of kernels that multiply."""

    @property
    def num_bytes(self) -> int:
        held = self.numbers._replace(bias=None)
        return sum(one.nbytes for one in held if one is not None)

    @property
    def kind(self) -> str:
        """What must be the same for experts to be multiplied together, in words."""
        numbers = self.numbers._asdict().items()
        has = [name for name, one in numbers if one is not None]
        layout = [f"{name} {value}" for name, value in self.layout._asdict().items()]
        return f"{self.out_features} rows of {', '.join(layout)} with {', '.join(has)}"

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Fill out [T, out_features], whose rows may lie apart. T is at least 1."""
        rows, tile, numbers = len(x), tile_of(len(x), self._dtype), self.numbers
        if numbers.order is not None:
            x = x.index_select(1, numbers.order)
        x, x_scales, x_sums = self.prepared(x)
        grid = -(-self.out_features // tile.outputs), -(-rows // tile.rows)
        parts = self._parts
        split = parts > 1 and rows <= _SPLIT_ROWS
        target = out
        if split:
            shape = parts, rows, self.out_features
            target = torch.empty(shape, dtype=torch.float32, device=out.device)
        bias = x if numbers.bias is None else numbers.bias
        linear_kernel[*grid, parts if split else 1](
            x,
            x_scales,
            x_sums,
            numbers.values_for(x),
            *numbers.parameters,
            bias,
            target,
            rows,
            self.out_features,
            self.in_features,
            x.stride(0),
            self.out_features if split else out.stride(0),
            *self.sizes,
            **self.constants,
            HAS_BIAS=numbers.bias is not None,
            SPLIT=split,
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if split:
            merge_kernel[rows, -(-self.out_features // _MERGED)](
                target,
                bias,
                out,
                rows,
                self.out_features,
                out.stride(0),
                parts,
                HAS_BIAS=numbers.bias is not None,
                TILE=_MERGED,
                num_warps=4,
            )

    def prepared(self, x: Tensor) -> Prepared:
        """Rows of inputs in the order of the columns as they are multiplied, with their scales and
        the sums of their chunks."""
        layout = self.layout
        if not layout.rounds and self.numbers.minimums is None:
            return Prepared(x, x, x)
        grid = len(x), -(-(layout.chunks * layout.chunk) // _PREPARED)
        shape = len(x), layout.chunks
        tile = {"CHUNK": layout.chunk, "CHUNKS": _PREPARED // layout.chunk, "num_warps": 4}
        sizes = self.in_features, x.stride(0), layout.chunks
        if not layout.rounds:
            sums = torch.empty(shape, dtype=torch.float32, device=x.device)
            sums_kernel[grid](x, sums, *sizes, **tile)
            return Prepared(x, x, sums)
        padded = len(x), layout.chunks * layout.chunk
        is_e4m3 = layout.code == "e4m3"
        rounded = torch.empty(padded, dtype=torch.uint8 if is_e4m3 else torch.int8, device=x.device)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        sums = scales if is_e4m3 else torch.empty(shape, dtype=torch.int32, device=x.device)
        quantize_kernel[grid](x, rounded, scales, sums, *sizes, CODE=layout.code, **tile)
        return Prepared(rounded.view(_E4M3) if is_e4m3 else rounded, scales, sums)

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty((len(ids), self.in_features), dtype=self._dtype, device=ids.device)
        if not len(ids):
            return out
        numbers, layout = self.numbers, self.layout
        rows_kernel[len(ids), layout.chunks](
            ids,
            numbers.values,
            *numbers.parameters,
            out,
            self.out_features,
            self.in_features,
            layout.repeat,
            layout.alike,
            numbers.scales.shape[-1],
            **self._constants,
            num_warps=1,
            enable_fp_fusion=False,
        )
        if numbers.order is None:
            return out
        return torch.empty_like(out).index_copy_(1, numbers.order.long(), out)


class FloatRun:
    """Rows of floats on the device, which cuBLAS multiplies."""

    def __init__(self, rows: FloatRows, dtype: torch.dtype, on: torch.device) -> None:
        self.out_features: int = rows.out_features
        self.weight: Tensor = torch.from_numpy(rows.weight).to(on).view(dtype)
        self.bias: Tensor | None = (
            None if rows.bias is None else torch.from_numpy(rows.bias).to(on).view(dtype)
        )

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def kind(self) -> str:
        return f"{self.out_features} rows of floats{'' if self.bias is None else ' with bias'}"

    def multiply(self, x: Tensor, out: Tensor) -> None:
        out.copy_(functional.linear(x, self.weight, self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class GroupedLinear(Linear):
    """A `HeldLinear` on a GPU. It leaves the host out of it, as `GpuLinear` does: an id that is no
    row is no error, and what it gives is anything."""

    __slots__ = ("_device", "runs")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self, held: HeldLinear, *, out_dtype: torch.dtype | None = None, device: torch.device
    ) -> None:
        dtype: torch.dtype = getattr(torch, held.dtype)
        self._describe(held.out_features, held.in_features, dtype, out_dtype)
        self._device = device
        self.runs: tuple[GroupedRun | FloatRun, ...] = tuple(
            FloatRun(run, dtype, device)
            if isinstance(run, FloatRows)
            else GroupedRun(run, held.in_features, dtype, device)
            for run in held.runs
        )
        self.num_bytes: int = sum(run.num_bytes for run in self.runs)

    @property
    def kind(self) -> str:
        """What must be the same for experts to be multiplied together, in words."""
        return "; ".join(run.kind for run in self.runs)

    def __call__(self, x: Tensor) -> Tensor:
        if (
            x.dtype is not self.dtype
            or x.dim() != 2
            or x.shape[1] != self.in_features
            or x.device != self._device
            or (x.stride(1) != 1 and self.in_features != 1)
        ):
            self._refuse(x)
        out = torch.empty((len(x), self.out_features), dtype=self.out_dtype, device=x.device)
        first = 0
        for run in self.runs if len(x) else ():
            run.multiply(x, out[:, first : first + run.out_features])
            first += run.out_features
        return out

    def rows(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        if len(self.runs) == 1:
            return self.runs[0].rows(ids)
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype, device=ids.device)
        first = 0
        for run in self.runs:
            found = run.rows((ids - first).clamp(0, run.out_features - 1))
            out = torch.where((ids >= first)[:, None], found, out)
            first += run.out_features
        return out


def _uploaded(numbers: npt.NDArray[Any], on: torch.device) -> Tensor:
    """int16 are the bits of bfloat16."""
    found = torch.from_numpy(numbers).to(on)
    return found.view(torch.bfloat16) if found.dtype is torch.int16 else found
