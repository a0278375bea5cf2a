"""Compilations of the kernels of latent attention, for `compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from aioserve.ops.gpu import latent_attention as latent
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK

__all__ = ["latent_builds"]

LatentBuild = tuple[Any, Mapping[str, str], Mapping[str, Any], int, int, tuple[int, ...], str]
"""Kernel, types of its arguments, constants, warps, stages, targets, label."""

POINTERS = {torch.float32: "*fp32:16", torch.float16: "*fp16:16", torch.bfloat16: "*bf16:16"}
RANK, ROTATED = 512, 64


def latent_builds(targets: tuple[int, ...]) -> Iterator[LatentBuild]:
    """Yield builds for DeepSeek V2 Lite's and V3's numbers of heads."""
    for dtype, heads, page in (
        (torch.bfloat16, 128, 16),
        (torch.float16, 16, 1),
        (torch.float32, 16, 16),
    ):
        sizes = {"HEADS": heads, "RANK": RANK, "ROTATED": ROTATED, "PAGE_SIZE": page}
        label = f"{str(dtype).removeprefix('torch.')} {heads}x{RANK}+{ROTATED}/{page}"
        yield _write(POINTERS[dtype], sizes, targets, label)
        for target, decodes in product(targets, (False, True)):
            yield _attention(
                dtype, sizes, target, f"{label}{' decodes' if decodes else ''}", decodes
            )


def _write(
    data: str, sizes: Mapping[str, int], targets: tuple[int, ...], label: str
) -> LatentBuild:
    types = {
        **dict.fromkeys(("queries", "latents", "pages", "weight"), data),
        "positions": "*i32:16",
        "locations": "*i64:16",
        **dict.fromkeys(("cos", "sin"), "*fp32:16"),
        **dict.fromkeys(("query_stride", "latent_stride", "page_stride"), "i32:16"),
        **dict.fromkeys(("eps", "weight_offset"), "fp32"),
    }
    tiles = {"HEAD_TILE": 16, "RANK_TILE": RANK, "HALF_TILE": ROTATED // 2, "REST_TILE": 0}
    turned = {"HALF": ROTATED // 2, "STEP": 2, "APART": 1}
    return latent.write_kernel, types, {**sizes, **turned, **tiles}, 4, 3, targets, label


def _attention(
    dtype: torch.dtype, sizes: Mapping[str, int], target: int, label: str, decodes: bool
) -> LatentBuild:
    tile = latent.latent_tile(dtype, target)
    types = {
        **dict.fromkeys(("queries", "out", "pages"), POINTERS[dtype]),
        **dict.fromkeys(("page_table", "query_start", "context_lens", "query_blocks"), "*i32:16"),
        **dict.fromkeys(("row_stride", "page_stride"), "i32:16"),
        "table_stride": "i32",
        "factor": "fp32",
    }
    constants = {
        **sizes,
        "QUERY_BLOCK": QUERY_BLOCK,
        "DECODES": decodes,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "RANK_TILE": RANK,
        "ROTATED_TILE": ROTATED,
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "log_sums": None,
    }
    return latent.attention_kernel, types, constants, tile.warps, tile.stages, (target,), label
