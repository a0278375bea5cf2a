"""What ops must be given: checks that all backends share, so that all refuse alike.

Each raises TypeError or ValueError naming the argument. Backends add what their kernels can't do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aioserve.ops.batch import Batch
from aioserve.ops.kv_cache import KVCache

__all__ = [
    "HeadNorms",
    "Rotation",
    "check_bounds",
    "check_gate_up",
    "check_head_norms",
    "check_qkv",
    "check_rotation",
    "check_rows",
    "check_tensor",
]


class Rotation(NamedTuple):
    """Tables of a rotary embedding: float32 `[positions, R / 2]` each, rows indexed by position."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head, with weights `[D]`; see `Backend.rms_norm`."""

    query: Tensor
    key: Tensor
    eps: float
    weight_offset: float = 0.0


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    """That it is dense and exactly so."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be contiguous, of shape {tuple(shape)} on {device}; got {_shown(tensor)}"
        )


def check_rows(name: str, x: Tensor, device: torch.device, shape: str = "[T, H]") -> None:
    """That it has two dimensions, and dense rows of floating point."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.dim() != 2 or x.stride(1) != 1 or x.device != device:
        _refuse_rows(name, x, shape, device)


def check_gate_up(gate_up: Tensor, device: torch.device) -> None:
    check_rows("gate_up", gate_up, device, "[T, 2 * I]")
    if gate_up.shape[1] % 2:
        _refuse_rows("gate_up", gate_up, "[T, 2 * I]", device)


def check_qkv(qkv: Tensor, batch: Batch, kv: KVCache, layer: int, device: torch.device) -> int:
    """The number of query heads."""
    if qkv.dtype is not kv.storage.dtype:
        raise TypeError(f"qkv must be {kv.dtype} as the KV pages, got {qkv.dtype}")
    tokens = batch.positions.shape[0]
    rows, width = qkv.shape if qkv.dim() == 2 else (-1, 0)
    q_heads, odd = divmod(width, kv.head_dim)
    q_heads -= 2 * kv.num_kv_heads
    if (
        rows != tokens
        or q_heads < 1
        or q_heads % kv.num_kv_heads
        or odd
        or qkv.stride(1) != 1
        or qkv.device != device
    ):
        heads = f"(Hq + 2 * {kv.num_kv_heads}) * {kv.head_dim}"
        multiple = f"Hq a multiple of {kv.num_kv_heads}"
        _refuse_rows("qkv", qkv, f"({tokens}, {heads}), {multiple},", device)
    if not 0 <= layer < kv.num_layers:
        raise ValueError(f"layer must be from 0 to {kv.num_layers - 1}, got {layer}")
    return q_heads


def check_rotation(rotation: Rotation, head_dim: int, device: torch.device) -> tuple[int, int]:
    """The shape of its tables."""
    shape = rotation.cos.shape
    if len(shape) != 2:
        raise ValueError(f"cos must have shape [positions, R / 2], got {tuple(shape)}")
    for name, table in zip(("cos", "sin"), rotation, strict=True):
        check_tensor(name, table, torch.float32, shape, device)
    positions, half = shape
    if 2 * half > head_dim:
        raise ValueError(f"cos must have at most {head_dim // 2} columns, got {half}")
    return positions, half


def check_head_norms(
    norms: HeadNorms, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor("norms.query", norms.query, dtype, (head_dim,), device)
    check_tensor("norms.key", norms.key, dtype, (head_dim,), device)


def check_bounds(window: int, soft_cap: float) -> None:
    if not (window >= 0 and soft_cap >= 0):
        raise ValueError(f"window and soft_cap must be at least 0, got {window} and {soft_cap}")


def _refuse_rows(name: str, x: Tensor, shape: str, device: torch.device) -> None:
    raise ValueError(f"{name} must have shape {shape} with dense rows on {device}; got {_shown(x)}")


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
