# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false, reportArgumentType=false
"""Linear layers of small numbers with scales in groups, on a GPU: launches and their sizes.

A row's result has the same bits in any batch. Choices by the number of rows affect only the time.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aioserve.formats.weights import FloatRows, GroupedRows, PackedLinear
from aioserve.ops.gpu.grouped_kernels import (
    Layout,
    Prepared,
    Sizes,
    Weight,
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
"""Fewest inputs in a part."""
_SPLIT_ROWS = 64
"""Most rows for which parts are programs of their own. More rows have enough tiles."""
_MERGED = 1024
"""Outputs of a row that one program merges."""
_PREPARED = 1024
"""Inputs of a row that one program sums or rounds."""
MIN_ROUNDED_CHUNK = 32
"""Fewest inputs of a chunk that tensor cores take as int8 or E4M3. With fewer, rows stay floats."""
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
    """Choose a tile for a number of rows, which tensor cores multiply as columns: they take at
    least 16. IEEE products of float32 don't run on them, and have their operands in registers."""
    if dtype is torch.float32:
        return Tile(32, 16, 4, 2)
    if rows <= 32:
        return Tile(64, 16 if rows <= 16 else 32, 4, 4)
    return Tile(64, 64, 8, 4)


def parts_of(out_features: int, chunks: int, chunk: int) -> int:
    """Chunks in a part of the inputs: few enough for one row to fill a device. The sums of all rows
    are taken by parts, so only the layer's shape may decide it."""
    wanted = max(1, min(_MOST_PARTS, _PROGRAMS // -(-out_features // 64)))
    return max(-(-chunks // wanted), -(-_PART_INPUTS // chunk))


def multiplies_e4m3(device: torch.device) -> bool:
    """True if tensor cores of the device multiply E4M3, and for Triton's interpreter."""
    is_interpreted = device.type == "cpu"
    return is_interpreted or torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


class Numbers(NamedTuple):
    """Contents of `GroupedRows` on the device. Several experts have an axis before all others."""

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
        """Upload rows. `dtype` is that of the bias."""

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

    def weight_for(self, x: Tensor) -> Weight:
        """Weight as kernels take it beside rows like x. They don't read what isn't there."""
        values = self.values.view(x.dtype) if x.dtype is _E4M3 else self.values
        return Weight(values, *(self.scales if one is None else one for one in self[1:7]))


def layout_of(rows: GroupedRows, in_features: int, on: torch.device) -> Layout:
    """Constants of kernels for these rows on a device."""
    rounds = rows.rounded_activations and rows.chunk >= MIN_ROUNDED_CHUNK
    return Layout(
        rows.code,
        rows.bits,
        rows.offset,
        rows.chunk,
        rows.unit_chunks,
        has_zeros=rows.zeros is not None,
        has_minimums=rows.minimums is not None,
        rounds=rounds and (rows.code != "e4m3" or multiplies_e4m3(on)),
        whole=in_features % rows.chunk == 0,
    )


class GroupedRun:
    """Rows of small numbers on the device."""

    def __init__(self, rows: GroupedRows, in_features: int, dtype: torch.dtype, on: torch.device):
        self.numbers: Numbers = Numbers.of(rows, dtype, on)
        self.layout: Layout = layout_of(rows, in_features, on)
        # `rows_kernel` doesn't multiply: layers that differ only in these share a compilation.
        self._rows_layout = self.layout._replace(rounds=False, whole=False)
        self._dtype = dtype
        chunks = rows.values.shape[0]
        self.sizes: Sizes = Sizes(
            rows.out_features,
            in_features,
            chunks,
            parts_of(rows.out_features, chunks, rows.chunk),
            rows.repeat,
            rows.alike,
            rows.scales.shape[1],
        )

    @property
    def out_features(self) -> int:
        return self.sizes.out_features

    @property
    def num_bytes(self) -> int:
        held = self.numbers._replace(bias=None)
        return sum(one.nbytes for one in held if one is not None)

    @property
    def kind(self) -> str:
        """Description of all that must be equal for experts to be multiplied together."""
        has = [name for name, one in self.numbers._asdict().items() if one is not None]
        shared = self.sizes._asdict() | self.layout._asdict()
        described = ", ".join(f"{name} {value}" for name, value in shared.items())
        return f"rows of {described} with {', '.join(has)}"

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Fill out [T, out_features], whose rows may lie apart. T is at least 1."""
        rows, tile, numbers = len(x), tile_of(len(x), self._dtype), self.numbers
        if numbers.order is not None:
            x = x.index_select(1, numbers.order)
        prepared = self.prepared(x)
        out_features, _, chunks, part_chunks, *_ = self.sizes
        grid = -(-out_features // tile.outputs), -(-rows // tile.rows)
        parts = -(-chunks // part_chunks)
        split = parts > 1 and rows <= _SPLIT_ROWS
        target = out
        if split:
            shape = parts, rows, out_features
            target = torch.empty(shape, dtype=torch.float32, device=out.device)
        bias = prepared.x if numbers.bias is None else numbers.bias
        linear_kernel[*grid, parts if split else 1](
            prepared,
            numbers.weight_for(prepared.x),
            bias,
            target,
            rows,
            *self.sizes,
            out_features if split else out.stride(0),
            self.layout,
            HAS_BIAS=numbers.bias is not None,
            SPLIT=split,
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if split:
            merge_kernel[rows, -(-out_features // _MERGED)](
                target,
                bias,
                out,
                rows,
                out_features,
                out.stride(0),
                parts,
                HAS_BIAS=numbers.bias is not None,
                TILE=_MERGED,
                num_warps=4,
            )

    def prepared(self, x: Tensor) -> Prepared:
        """Rows of inputs in the order in which columns are multiplied, with their scales and the
        sums of their chunks."""
        layout, chunks = self.layout, self.sizes.chunks
        if not layout.rounds and not layout.has_minimums:
            return Prepared(x, x, x, x.stride(0))
        grid = len(x), -(-(chunks * layout.chunk) // _PREPARED)
        shape = len(x), chunks
        tile = {"CHUNK": layout.chunk, "CHUNKS": _PREPARED // layout.chunk, "num_warps": 4}
        sizes = self.sizes.in_features, x.stride(0), chunks
        if not layout.rounds:
            sums = torch.empty(shape, dtype=torch.float32, device=x.device)
            sums_kernel[grid](x, sums, *sizes, **tile)
            return Prepared(x, x, sums, x.stride(0))
        padded = len(x), chunks * layout.chunk
        is_e4m3 = layout.code == "e4m3"
        rounded = torch.empty(padded, dtype=torch.uint8 if is_e4m3 else torch.int8, device=x.device)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        sums = scales if is_e4m3 else torch.empty(shape, dtype=torch.int32, device=x.device)
        quantize_kernel[grid](x, rounded, scales, sums, *sizes, CODE=layout.code, **tile)
        if is_e4m3:
            rounded = rounded.view(_E4M3)
        return Prepared(rounded, scales, sums, rounded.stride(0))

    def rows(self, ids: Tensor) -> Tensor:
        sizes, numbers = self.sizes, self.numbers
        out = torch.empty((len(ids), sizes.in_features), dtype=self._dtype, device=ids.device)
        if not len(ids):
            return out
        rows_kernel[len(ids), sizes.chunks](
            ids,
            numbers.weight_for(out),
            out,
            sizes.out_features,
            sizes.in_features,
            sizes.repeat,
            sizes.alike,
            sizes.scale_columns,
            self._rows_layout,
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
    """A `PackedLinear` on a GPU, without waiting on the host, like `GpuLinear`. An id that is no
    row raises no error, and gives arbitrary numbers."""

    __slots__ = ("_device", "runs")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self, held: PackedLinear, *, out_dtype: torch.dtype | None = None, device: torch.device
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
        """Description of all that must be equal for experts to be multiplied together."""
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
    """Upload numbers; int16 are the bits of bfloat16."""
    found = torch.from_numpy(numbers).to(on)
    return found.view(torch.bfloat16) if found.dtype is torch.int16 else found
