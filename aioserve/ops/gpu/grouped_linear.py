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
import triton
from torch import Tensor
from torch.nn import functional

from aioserve.models.computed import FloatRows, GroupedRows, HeldLinear
from aioserve.ops.gpu.grouped_kernels import (
    linear_kernel,
    merge_kernel,
    quantize_kernel,
    rows_kernel,
    sums_kernel,
)
from aioserve.ops.linear import Linear

__all__ = ["GroupedLinear", "Tile", "multiplies_e4m3", "parts_of", "tile_of"]

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


class _Grouped:
    """Rows of small numbers on the device."""

    def __init__(self, rows: GroupedRows, in_features: int, dtype: torch.dtype, on: torch.device):
        self.out_features: int = rows.out_features
        self._in_features = in_features
        self._dtype = dtype

        def uploaded(numbers: npt.NDArray[Any] | None) -> Tensor | None:
            return None if numbers is None else _uploaded(numbers, on)

        self._values = _uploaded(rows.values, on)
        self._scales = _uploaded(rows.scales, on)
        self._bias = None if rows.bias is None else torch.from_numpy(rows.bias).to(on).view(dtype)
        self._order = uploaded(rows.order)
        parameters = (
            uploaded(rows.table),
            self._scales,
            uploaded(rows.scale_units),
            uploaded(rows.zeros),
            uploaded(rows.minimums),
            uploaded(rows.minimum_units),
        )
        held = self._values, self._order, *parameters
        self.num_bytes: int = sum(one.nbytes for one in held if one is not None)
        # Kernels don't read what isn't there.
        self._parameters = tuple(self._scales if one is None else one for one in parameters)
        self._code = rows.code
        self._rounds = rows.rounded_activations and rows.chunk >= MIN_ROUNDED_CHUNK
        if rows.code == "e4m3":
            self._rounds = self._rounds and multiplies_e4m3(on)
        self._chunk = rows.chunk
        self._chunks = rows.values.shape[0]
        self._groups = rows.repeat, rows.alike, self._scales.shape[1]
        self._has_minimums = rows.minimums is not None
        self._part_chunks = parts_of(self.out_features, self._chunks, rows.chunk)
        self._parts = -(-self._chunks // self._part_chunks)
        self._layout: dict[str, Any] = {
            "CODE": rows.code,
            "BITS": rows.bits,
            "OFFSET": rows.offset,
            "CHUNK": rows.chunk,
            "UNIT_CHUNKS": rows.unit_chunks,
            "HAS_ZEROS": rows.zeros is not None,
            "HAS_MINIMUMS": rows.minimums is not None,
        }

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Fill out [T, out_features], whose rows may lie apart. T is at least 1."""
        rows, tile = len(x), tile_of(len(x), self._dtype)
        if self._order is not None:
            x = x.index_select(1, self._order)
        x, x_scales, x_sums = self._prepared(x)
        grid = triton.cdiv(self.out_features, tile.outputs), triton.cdiv(rows, tile.rows)
        split = self._parts > 1 and rows <= _SPLIT_ROWS
        target = out
        if split:
            shape = self._parts, rows, self.out_features
            target = torch.empty(shape, dtype=torch.float32, device=out.device)
        linear_kernel[*grid, self._parts if split else 1](
            x,
            x_scales,
            x_sums,
            self._values.view(x.dtype) if x.dtype is _E4M3 else self._values,
            *self._parameters,
            x if self._bias is None else self._bias,
            target,
            rows,
            self.out_features,
            self._in_features,
            x.stride(0),
            self.out_features if split else out.stride(0),
            self._chunks,
            self._part_chunks,
            *self._groups,
            **self._layout,
            WHOLE=self._in_features % self._chunk == 0,
            ROUNDED=self._rounds,
            HAS_BIAS=self._bias is not None,
            SPLIT=split,
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if split:
            merge_kernel[rows, triton.cdiv(self.out_features, _MERGED)](
                target,
                x if self._bias is None else self._bias,
                out,
                rows,
                self.out_features,
                out.stride(0),
                self._parts,
                HAS_BIAS=self._bias is not None,
                TILE=_MERGED,
                num_warps=4,
            )

    def _prepared(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x as it is multiplied, its scales and the sums of its chunks; x in place of what isn't
        needed."""
        if not self._rounds and not self._has_minimums:
            return x, x, x
        grid = len(x), triton.cdiv(self._chunks * self._chunk, _PREPARED)
        shape = len(x), self._chunks
        tile = {"CHUNK": self._chunk, "CHUNKS": _PREPARED // self._chunk, "num_warps": 4}
        sizes = self._in_features, x.stride(0), self._chunks
        if not self._rounds:
            sums = torch.empty(shape, dtype=torch.float32, device=x.device)
            sums_kernel[grid](x, sums, *sizes, **tile)
            return x, x, sums
        padded = len(x), self._chunks * self._chunk
        is_e4m3 = self._code == "e4m3"
        rounded = torch.empty(padded, dtype=torch.uint8 if is_e4m3 else torch.int8, device=x.device)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        sums = scales if is_e4m3 else torch.empty(shape, dtype=torch.int32, device=x.device)
        quantize_kernel[grid](x, rounded, scales, sums, *sizes, CODE=self._code, **tile)
        return rounded.view(_E4M3) if is_e4m3 else rounded, scales, sums

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty((len(ids), self._in_features), dtype=self._dtype, device=ids.device)
        if not len(ids):
            return out
        rows_kernel[len(ids), self._chunks](
            ids,
            self._values,
            *self._parameters,
            out,
            self.out_features,
            self._in_features,
            *self._groups,
            **self._layout,
            num_warps=1,
            enable_fp_fusion=False,
        )
        if self._order is None:
            return out
        return torch.empty_like(out).index_copy_(1, self._order.long(), out)


class _Floats:
    """Rows of floats on the device, which cuBLAS multiplies."""

    def __init__(self, rows: FloatRows, dtype: torch.dtype, on: torch.device) -> None:
        self.out_features: int = rows.out_features
        self._weight = torch.from_numpy(rows.weight).to(on).view(dtype)
        self._bias = None if rows.bias is None else torch.from_numpy(rows.bias).to(on).view(dtype)
        self.num_bytes: int = self._weight.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        out.copy_(functional.linear(x, self._weight, self._bias))

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)


class GroupedLinear(Linear):
    """A `HeldLinear` on a GPU. It leaves the host out of it, as `GpuLinear` does: an id that is no
    row is no error, and what it gives is anything."""

    __slots__ = ("_device", "_runs")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self, held: HeldLinear, *, out_dtype: torch.dtype | None = None, device: torch.device
    ) -> None:
        dtype: torch.dtype = getattr(torch, held.dtype)
        self._describe(held.out_features, held.in_features, dtype, out_dtype)
        self._device = device
        self._runs: tuple[_Grouped | _Floats, ...] = tuple(
            _Floats(run, dtype, device)
            if isinstance(run, FloatRows)
            else _Grouped(run, held.in_features, dtype, device)
            for run in held.runs
        )
        self.num_bytes: int = sum(run.num_bytes for run in self._runs)

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
        for run in self._runs if len(x) else ():
            run.multiply(x, out[:, first : first + run.out_features])
            first += run.out_features
        return out

    def rows(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        if len(self._runs) == 1:
            return self._runs[0].rows(ids)
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype, device=ids.device)
        first = 0
        for run in self._runs:
            found = run.rows((ids - first).clamp(0, run.out_features - 1))
            out = torch.where((ids >= first)[:, None], found, out)
            first += run.out_features
        return out


def _uploaded(numbers: npt.NDArray[Any], on: torch.device) -> Tensor:
    """int16 are the bits of bfloat16."""
    found = torch.from_numpy(numbers).to(on)
    return found.view(torch.bfloat16) if found.dtype is torch.int16 else found
