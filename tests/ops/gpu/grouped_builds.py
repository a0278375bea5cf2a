"""Compilations of the linear layers of integers, as `compile_kernels` compiles them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from aioserve.ops.gpu import grouped_kernels as kernels
from aioserve.ops.gpu.grouped_linear import tile_of

__all__ = ["GroupedBuild", "grouped_builds"]

POINTERS = {torch.float32: "*fp32:16", torch.float16: "*fp16:16", torch.bfloat16: "*bf16:16"}
I8, U8, I32, I64, F32, F16 = "*i8:16", "*u8:16", "*i32:16", "*i64:16", "*fp32:16", "*fp16:16"


class GroupedBuild(NamedTuple):
    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    label: str


class Layer(NamedTuple):
    dtype: torch.dtype
    bits: int
    chunk: int
    kind: str = "plain"
    """Or zeros, or minimums."""
    integers: bool = False
    scales: str = F16

    @property
    def label(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')} int{self.bits}/{self.chunk} {self.kind}"
            f"{' int8 rows' if self.integers else ''}"
        )

    @property
    def data(self) -> str:
        return POINTERS[self.dtype]

    @property
    def parameters(self) -> dict[str, str]:
        return {
            "values": U8 if self.bits == 4 else I8,
            "scales": self.scales,
            "zeros": I8,
            "minimums": self.scales,
        }

    @property
    def layout(self) -> dict[str, Any]:
        return {
            "BITS": self.bits,
            "OFFSET": 8 if self.bits == 4 and self.kind != "minimums" else 0,
            "CHUNK": self.chunk,
            "HAS_ZEROS": self.kind == "zeros",
            "HAS_MINIMUMS": self.kind == "minimums",
        }


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = (
    (Layer(BF16, 4, 32), (16, 32, 64)),
    (Layer(FP16, 4, 128, "zeros"), (16, 64)),
    (Layer(BF16, 4, 32, "minimums", scales=F32), (64,)),
    (Layer(BF16, 8, 128), (16, 64)),
    (Layer(BF16, 8, 16), (64,)),
    (Layer(BF16, 8, 128, integers=True), (16, 64)),
    (Layer(FP16, 4, 32, "minimums", integers=True, scales=F32), (64,)),
    (Layer(BF16, 4, 128, "zeros", integers=True), (64,)),
    (Layer(FP32, 4, 32, "minimums"), (16,)),
    (Layer(FP32, 8, 128), (64,)),
)
"""With numbers of rows: those of tiles. Few rows are multiplied by parts."""


def grouped_builds() -> Iterator[GroupedBuild]:
    for layer, counts in LAYERS:
        for rows in counts:
            yield _linear(layer, rows)
    four, sizes = Layer(BF16, 4, 32, "minimums", scales=F32), {"CHUNK": 32, "CHUNKS": 32}
    prepared = {"x": four.data, "in_features": "i32", "x_stride": "i32:16", "chunks": "i32"}
    yield GroupedBuild(kernels.sums_kernel, {**prepared, "sums": F32}, sizes, 4, 3, "")
    yield GroupedBuild(
        kernels.quantize_kernel,
        {**prepared, "integers": I8, "scales": F32, "sums": I32},
        sizes,
        4,
        3,
        "",
    )
    yield GroupedBuild(
        kernels.merge_kernel,
        {
            "partials": F32,
            "bias": four.data,
            "out": four.data,
            "rows": "i32",
            "out_features": "i32",
            "out_stride": "i32:16",
            "parts": "i32",
        },
        {"HAS_BIAS": True, "TILE": 1024},
        4,
        3,
        "",
    )
    yield GroupedBuild(
        kernels.rows_kernel,
        {
            "ids": I64,
            **four.parameters,
            "out": four.data,
            "out_features": "i32",
            "in_features": "i32",
            "repeat": "i32",
        },
        four.layout,
        1,
        3,
        four.label,
    )


def _linear(layer: Layer, rows: int) -> GroupedBuild:
    tile, split = tile_of(rows, layer.dtype), rows == 16
    return GroupedBuild(
        kernels.linear_kernel,
        {
            "x": I8 if layer.integers else layer.data,
            "x_scales": F32,
            "x_sums": I32 if layer.integers else F32,
            **layer.parameters,
            "bias": layer.data,
            "out": F32 if split else layer.data,
            **dict.fromkeys(
                ("rows", "out_features", "in_features", "chunks", "part_chunks", "repeat"), "i32"
            ),
            "x_stride": "i32:16",
            "out_stride": "i32:16",
        },
        {
            **layer.layout,
            "WHOLE": layer.bits == 4,
            "INTEGERS": layer.integers,
            "HAS_BIAS": not split,
            "SPLIT": split,
            "OUTPUTS": tile.outputs,
            "ROWS": tile.rows,
        },
        tile.warps,
        tile.stages,
        f"{layer.label} {rows}",
    )
