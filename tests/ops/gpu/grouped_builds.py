"""Compilations of the linear layers of small numbers, for `compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from aioserve.formats.weights import Code
from aioserve.ops.gpu import grouped_experts
from aioserve.ops.gpu import grouped_kernels as kernels
from aioserve.ops.gpu.expert_pairs import ROWS
from aioserve.ops.gpu.grouped_kernels import Layout, Prepared, Sizes, Weight
from aioserve.ops.gpu.grouped_linear import tile_of

__all__ = ["GroupedBuild", "grouped_builds"]

POINTERS = {torch.float32: "*fp32:16", torch.float16: "*fp16:16", torch.bfloat16: "*bf16:16"}
I8, U8, I32, I64, F32, F16 = "*i8:16", "*u8:16", "*i32:16", "*i64:16", "*fp32:16", "*fp16:16"
E4M3 = "*fp8e4nv:16"


class GroupedBuild(NamedTuple):
    function: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    label: str
    targets: tuple[int, ...] = (80, 90, 100)


class Layer(NamedTuple):
    dtype: torch.dtype
    bits: int
    chunk: int
    kind: str = "plain"
    """Kind of groups: "plain", "zeros" or "minimums"."""
    rounded: bool = False
    scales: str = F16
    """Triton's type of the scales; int8 means multiples."""
    code: Code = "integers"

    @property
    def label(self) -> str:
        name = f"int{self.bits}" if self.code == "integers" else self.code
        rows = "" if not self.rounded else " e4m3 rows" if self.code == "e4m3" else " int8 rows"
        multiples = " of multiples" if self.scales == I8 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {name}/{self.chunk} {self.kind}{multiples}{rows}"

    @property
    def data(self) -> str:
        return POINTERS[self.dtype]

    @property
    def weight(self) -> Weight:
        """Triton's types of the weight's parts."""
        values = U8 if self.bits == 4 or self.code == "e4m3" else I8
        types: dict[str, Any] = {
            "packed": E4M3 if self.code == "e4m3" and self.rounded else values,
            "table": F32,
            "scales": self.scales,
            "scale_units": F32,
            "zeros": I8,
            "minimums": self.scales,
            "minimum_units": F32,
        }
        return Weight(**types)

    @property
    def layout(self) -> Layout:
        has_offset = self.bits == 4 and self.kind != "minimums" and self.code == "integers"
        return Layout(
            code=self.code,
            bits=self.bits,
            offset=8 if has_offset else 0,
            chunk=self.chunk,
            unit_chunks=256 // self.chunk if self.scales == I8 else 0,
            has_zeros=self.kind == "zeros",
            has_minimums=self.kind == "minimums",
            rounds=self.rounded,
            whole=self.bits == 4,
        )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = (
    (Layer(BF16, 4, 32), (16, 32, 64)),
    (Layer(FP16, 4, 128, "zeros"), (16, 64)),
    (Layer(BF16, 4, 32, "minimums", scales=F32), (64,)),
    (Layer(BF16, 8, 128), (16, 64)),
    (Layer(BF16, 8, 16), (64,)),
    (Layer(BF16, 8, 128, rounded=True), (16, 64)),
    (Layer(FP16, 4, 32, "minimums", rounded=True, scales=F32), (64,)),
    (Layer(BF16, 4, 128, "zeros", rounded=True), (64,)),
    (Layer(FP32, 4, 32, "minimums"), (16,)),
    (Layer(FP32, 8, 128), (64,)),
    (Layer(BF16, 8, 128, scales=F32, code="e4m3"), (16, 32, 64)),
    (Layer(FP16, 8, 32, scales=F32, code="e4m3"), (16,)),
    (Layer(FP32, 8, 128, scales=F32, code="e4m3"), (64,)),
    (Layer(BF16, 8, 128, scales=F32, code="e4m3", rounded=True), (16, 32, 64)),
    (Layer(BF16, 8, 32, scales=F32, code="e4m3", rounded=True), (16,)),
    (Layer(BF16, 4, 64, scales=F32, code="table"), (16, 64)),
    (Layer(FP32, 4, 64, scales=F32, code="table"), (64,)),
    (Layer(BF16, 4, 32, code="chosen"), (16, 64)),
    (Layer(BF16, 4, 32, "minimums", scales=I8), (16, 64)),
    (Layer(BF16, 8, 16, scales=I8), (64,)),
)
"""Layers, each with numbers of rows, which are those of tiles. Few rows are multiplied in parts."""


def grouped_builds() -> Iterator[GroupedBuild]:
    for layer, counts in LAYERS:
        for rows in counts:
            yield _linear(layer, rows)
        if ROWS in counts:
            yield _experts(layer)
    yield GroupedBuild(
        grouped_experts.order_kernel,
        {
            **dict.fromkeys(("x", "out"), POINTERS[BF16]),
            "rows": I32,
            "experts": I64,
            "order": I32,
            "in_features": "i32",
            "x_stride": "i32:16",
            "count": "i32",
        },
        {"TILE": 1024},
        4,
        3,
        "",
    )
    four, sizes = Layer(BF16, 4, 32, "minimums", scales=F32), {"CHUNK": 32, "CHUNKS": 32}
    prepared = {"x": four.data, "in_features": "i32", "x_stride": "i32:16", "chunks": "i32"}
    yield GroupedBuild(kernels.sums_kernel, {**prepared, "sums": F32}, sizes, 4, 3, "")
    yield GroupedBuild(
        kernels.quantize_kernel,
        {**prepared, "rounded": I8, "scales": F32, "sums": I32},
        {**sizes, "CODE": "integers"},
        4,
        3,
        "",
    )
    yield GroupedBuild(
        kernels.quantize_kernel,
        {**prepared, "rounded": U8, "scales": F32, "sums": F32},
        {"CHUNK": 128, "CHUNKS": 8, "CODE": "e4m3"},
        4,
        3,
        "e4m3",
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
    floats = (Layer(BF16, 8, 128, scales=F32, code="e4m3"), Layer(BF16, 4, 64, code="table"))
    for layer in (four, Layer(BF16, 4, 32, "minimums", scales=I8), *floats):
        yield GroupedBuild(
            kernels.rows_kernel,
            {
                "ids": I64,
                "weight": layer.weight,
                "out": layer.data,
                **dict.fromkeys(
                    ("out_features", "in_features", "repeat", "alike", "scale_columns"), "i32"
                ),
            },
            {"layout": layer.layout},
            1,
            3,
            layer.label,
        )


def _linear(layer: Layer, rows: int) -> GroupedBuild:
    tile, split = tile_of(rows, layer.dtype), rows == 16
    return GroupedBuild(
        kernels.linear_kernel,
        {
            **_multiplied(layer),
            "out": F32 if split else layer.data,
            "rows": "i32",
        },
        {
            **_constants(layer, rows),
            "HAS_BIAS": not split,
            "SPLIT": split,
        },
        tile.warps,
        tile.stages,
        f"{layer.label} {rows}",
        _targets(layer),
    )


def _experts(layer: Layer) -> GroupedBuild:
    tile = tile_of(ROWS, layer.dtype)
    return GroupedBuild(
        grouped_experts.grouped_expert_kernel,
        {
            **_multiplied(layer),
            "out": F32 if layer.kind == "plain" else layer.data,
            **dict.fromkeys(("rows", "block_experts", "block_starts", "block_ends"), I32),
            "experts": "i32",
        },
        {**_constants(layer, ROWS), "HAS_BIAS": True},
        tile.warps,
        tile.stages,
        layer.label,
        _targets(layer),
    )


def _multiplied(layer: Layer) -> dict[str, Any]:
    """Return the arguments of all kernels that multiply."""
    rounded = E4M3 if layer.code == "e4m3" else I8
    types: dict[str, Any] = {
        "x": rounded if layer.rounded else layer.data,
        "scales": F32,
        "sums": I32 if layer.rounded and layer.code == "integers" else F32,
        "stride": "i32:16",
    }
    return {
        "prepared": Prepared(**types),
        "weight": layer.weight,
        "bias": layer.data,
        "out_stride": "i32:16",
        **dict.fromkeys(Sizes._fields, "i32"),
    }


def _constants(layer: Layer, rows: int) -> dict[str, Any]:
    tile = tile_of(rows, layer.dtype)
    return {"layout": layer.layout, "OUTPUTS": tile.outputs, "ROWS": tile.rows}


def _targets(layer: Layer) -> tuple[int, ...]:
    return (90, 100) if layer.rounded and layer.code == "e4m3" else (80, 90, 100)
