# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false
"""Norms and gated activations, one program for a row or a part of one.

Sums are float32, taken over one tile that holds the whole row, so a row's result depends only on
that row and its size. Callers have checked the arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.formats.routing import ClampedSwiglu
from aioserve.ops.checks import RMSNorm

__all__ = [
    "MAX_ROW",
    "clamped_swiglu",
    "clamped_swiglu_kernel",
    "gated",
    "gated_kernel",
    "norm_warps",
    "rms_norm",
    "rms_norm_kernel",
]

MAX_ROW = 32_768
"""Longest row of a norm: one program holds it in registers."""

_GATED_TILE = 1024


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    eps,
    weight_offset,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row). With ADD the row of x is first added to that of `residual`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * SIZE + columns
        before = tl.load(at, mask=inside, other=0.0)
        total = (before.to(tl.float32) + values).to(before.dtype)
        tl.store(at, total, mask=inside)
        # The sum as it was stored.
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
    result = values * scale * factors
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(gate_up, out, stride, SIZE: tl.constexpr, GELU: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile of columns): `silu(gate) * up`, or with GELU gelu's tanh approximation."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    at = gate_up + row * stride + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is sigmoid(2 u).
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # The power is at most 1, so a large negative gate causes no overflow.
    power = tl.exp(-tl.abs(slope))
    sigmoid = tl.where(slope >= 0, 1.0, power) / (1.0 + power)
    result = gate * sigmoid * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def clamped_swiglu_kernel(
    gate_up, out, stride, gain, limit, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Program (row, tile of columns): `aioserve.formats.routing.ClampedSwiglu`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    at = gate_up + row * stride + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    # Comparisons let NaN through.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    slope = gain * gate
    power = tl.exp(-tl.abs(slope))
    sigmoid = tl.where(slope >= 0, 1.0, power) / (1.0 + power)
    result = (up + 1.0) * (gate * sigmoid)
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, norm: RMSNorm, residual: Tensor | None) -> Tensor:
    rows, size = x.shape
    if size > MAX_ROW:
        raise ValueError(f"x must have rows of at most {MAX_ROW}, got {size}")
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = 1 << (size - 1).bit_length()
    rms_norm_kernel[(rows,)](
        x,
        out if residual is None else residual,
        norm.weight,
        out,
        x.stride(0),
        norm.eps,
        norm.weight_offset,
        SIZE=size,
        ADD=residual is not None,
        TILE=tile,
        num_warps=norm_warps(tile),
    )
    return out


def norm_warps(tile: int) -> int:
    """Warps for a tile: each thread has eight numbers or more."""
    return max(1, min(16, tile // 256))


def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """`act(gate) * up` of `[T, 2 * I]`: `gelu` with the tanh approximation, else silu."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    gated_kernel[(rows, -(-size // _GATED_TILE))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        GELU=gelu,
        TILE=_GATED_TILE,
        num_warps=4,
    )
    return out


def clamped_swiglu(gate_up: Tensor, kind: ClampedSwiglu) -> Tensor:
    """Apply `kind` to `[T, 2 * I]`, gate then up: `[T, I]`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    clamped_swiglu_kernel[(rows, -(-size // _GATED_TILE))](
        gate_up,
        out,
        gate_up.stride(0),
        kind.gain,
        kind.limit,
        SIZE=size,
        TILE=_GATED_TILE,
        num_warps=4,
    )
    return out
