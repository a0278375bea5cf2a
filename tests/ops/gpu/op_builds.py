"""Compilations of the ops other than attention, for `compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton

from aioserve.ops.gpu import experts, race, rotary, rowwise, sampling, sampling_kernels
from aioserve.ops.gpu.expert_pairs import ROWS
from aioserve.ops.gpu.inputs import fill_kernel

__all__ = ["op_builds"]

OpBuild = tuple[Any, Mapping[str, str], Mapping[str, Any], int, str]
"""Kernel, types of its arguments, constants, warps, label."""

POINTERS = {torch.float32: "*fp32:16", torch.float16: "*fp16:16", torch.bfloat16: "*bf16:16"}
I32, I64, F32, F64 = "*i32:16", "*i64:16", "*fp32:16", "*fp64:16"


def op_builds() -> Iterator[OpBuild]:
    for dtype, size in ((torch.bfloat16, 1024), (torch.float32, 8192)):
        yield from _row_builds(dtype, size)
    for dtype, half, norms, dim, page in (
        (torch.bfloat16, 64, True, 128, 16),
        (torch.float16, 16, False, 80, 1),
        (torch.float32, 0, False, 64, 128),
        (torch.bfloat16, 128, True, 256, 16),
    ):
        yield _rotary_build(dtype, half, norms, dim, page)
    yield _rotary_build(torch.bfloat16, 64, False, 128, 16, interleaved=True)
    yield _rotary_build(torch.float16, 32, False, 128, 16, scaled=True)
    for dtype in POINTERS:
        yield from _expert_builds(dtype)
    yield from _sampling_builds(151_936)
    types = {"token_ids": I64, "token_slots": I64, "last_tokens": I64, "count": "i32"}
    yield fill_kernel, types, {"TILE": 256}, 4, ""


def _row_builds(dtype: torch.dtype, size: int) -> Iterator[OpBuild]:
    data, name = POINTERS[dtype], str(dtype).removeprefix("torch.")
    tile = 1 << (size - 1).bit_length()
    for add in (False, True):
        yield (
            rowwise.rms_norm_kernel,
            {
                **dict.fromkeys(("x", "residual", "weight", "out"), data),
                "x_stride": "i32:16",
                "eps": "fp32",
                "weight_offset": "fp32",
            },
            {"SIZE": size, "ADD": add, "TILE": tile},
            rowwise.norm_warps(tile),
            f"{name} {size}{' add' if add else ''}",
        )
    for gelu in (False, True):
        yield (
            rowwise.gated_kernel,
            {"gate_up": data, "out": data, "stride": "i32:16"},
            {"SIZE": 3 * size, "GELU": gelu, "TILE": 1024},
            4,
            f"{name} {3 * size}{' gelu' if gelu else ''}",
        )
    yield (
        rowwise.clamped_swiglu_kernel,
        {"gate_up": data, "out": data, "stride": "i32:16", "gain": "fp32", "limit": "fp32"},
        {"SIZE": 3 * size, "TILE": 1024},
        4,
        f"{name} {3 * size}",
    )


def _rotary_build(
    dtype: torch.dtype,
    half: int,
    norms: bool,
    dim: int,
    page: int,
    *,
    interleaved: bool = False,
    scaled: bool = False,
) -> OpBuild:
    data, rest = POINTERS[dtype], dim - 2 * half
    heads = {"Q_HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": dim, "PAGE_SIZE": page}
    return (
        rotary.rotary_kernel,
        {
            **dict.fromkeys(("qkv", "k_pages", "v_pages", "query_norm", "key_norm"), data),
            "positions": I32,
            "locations": I64,
            **dict.fromkeys(("cos", "sin"), F32 if half else data),
            "query_scale": F32 if scaled else data,
            "row_stride": "i32:16",
            "page_stride": "i32:16",
            "eps": "fp32",
            "weight_offset": "fp32",
        },
        {
            **heads,
            "HALF": half,
            "STEP": 2 if interleaved else 1,
            "APART": 1 if interleaved else half,
            "SCALED": scaled,
            "NORMS": norms,
            "HEADS": rotary.HEADS,
            "HALF_TILE": triton.next_power_of_2(half) if half else 0,
            "REST_TILE": triton.next_power_of_2(rest) if rest else 0,
        },
        4,
        f"{str(dtype).removeprefix('torch.')} {dim}/{page} half {half}{' norms' if norms else ''}"
        f"{' interleaved' if interleaved else ''}{' scaled' if scaled else ''}",
    )


def _expert_builds(dtype: torch.dtype) -> Iterator[OpBuild]:
    data, name = POINTERS[dtype], str(dtype).removeprefix("torch.")
    sizes = {"OUTPUTS": experts.OUTPUTS, "ROWS": ROWS, "INPUTS": experts.INPUTS}
    for out in dict.fromkeys((data, F32)):
        yield (
            experts.expert_kernel,
            {
                **dict.fromkeys(("x", "weight", "bias"), data),
                "out": out,
                **dict.fromkeys(("rows", "block_experts", "block_starts", "block_ends"), I32),
                **dict.fromkeys(("out_features", "in_features", "experts"), "i32"),
                "out_stride": "i32",
            },
            {"HAS_BIAS": True, **sizes},
            4,
            f"{name}{' to float32' if out != data else ''}",
        )
    yield (
        experts.sum_kernel,
        {"parts": F32, "places": I32, "weights": F32, "out": data},
        {"SIZE": 2048, "TOP_K": 8, "TILE": experts.SUM_TILE},
        4,
        name,
    )


def _sampling_builds(vocab: int) -> Iterator[OpBuild]:
    blocks = triton.cdiv(-(-vocab // sampling.LINES), sampling.COLUMNS)
    tile = {"VOCAB": vocab, "LINES": sampling.LINES, "COLS": sampling.COLUMNS}
    parts = {"BLOCKS": blocks, "BLOCKS_TILE": triton.next_power_of_2(blocks)}
    levels = {"LEVELS": sampling.LEVELS}
    stride = {"stride": "i32" if vocab % 16 else "i32:16"}
    data = {"logits": F32, **stride}
    temperatures = {"temperatures": F64}
    limits = {**temperatures, "top_ks": I64, "top_ps": F64}
    noise = {"seeds": I64, "positions": I64}
    done = {"slots": I64, "last_tokens": I64, "tokens": I64, "statuses": I32}
    found = {"largests": F32, "kinds": I32}
    listed = {"counts": I32, "listed": F32, "listed_ids": I32}
    groups = {"GROUPS": sampling.GROUPS}
    searched = {"SEARCHED": sampling.SEARCHED}
    reduced = {"block_largest": F32, "block_ids": I32, "group_largest": F32}
    label = str(vocab)
    kernels = sampling_kernels
    yield kernels.reduce_kernel, {**data, **reduced}, {**tile, **groups}, 4, label
    yield (
        kernels.first_kernel,
        {**reduced, **limits, **done, **found, "floors": F32, "counts": I32},
        {"VOCAB": vocab, **parts, **groups, **searched},
        4,
        label,
    )
    yield (
        kernels.weigh_kernel,
        {**data, **temperatures, "top_ks": I64, **found, "masses": I64},
        {**tile, **levels},
        4,
        label,
    )
    yield (
        kernels.gather_kernel,
        {**data, **limits, **found, "floors": F32, "masses": I64, "totals": I64, **listed},
        {**tile, **levels, **parts, "LISTED": sampling.LISTED},
        4,
        label,
    )
    borders = {"orders": I64, "last_ids": I32}
    yield (
        kernels.border_kernel,
        {**data, **limits, **found, "floors": F32, "totals": I64, **listed, **borders},
        {"VOCAB": vocab, "LISTED": sampling.LISTED, **searched},
        8,
        label,
    )
    raced = triton.cdiv(vocab, 4 * sampling.CALLS)
    winners = {"scores": F64, "winners": I32}
    yield (
        race.race_kernel,
        {**data, **temperatures, **noise, **found, **borders, **winners},
        {"VOCAB": vocab, "CALLS": sampling.CALLS},
        4,
        label,
    )
    yield (
        race.win_kernel,
        {**winners, "kinds": I32, **done},
        {"BLOCKS": raced, "BLOCKS_TILE": triton.next_power_of_2(raced)},
        4,
        label,
    )
