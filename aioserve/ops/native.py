"""Every op in C++ for CPUs, float32 and bfloat16; `aioserve.ops.reference` documents each.

Checks shapes, dtypes and strides, then hands addresses to `aioserve._native`, which releases the
GIL. All tensors of a call live on the CPU and share one dtype (the cos and sin tables: float32).

Each result row depends only on its own sequence and position: not on its neighbours in the batch,
the number of threads, the page size, or where a prefill was cut into chunks, all to the last bit.
Another instruction set may round differently.

Raises:
    TypeError: a dtype that is not supported or differs from the first argument's.
    ValueError: a shape, stride, device, page or location that does not fit, naming the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.kv_cache import KVCache
from aioserve.ops.types import AttentionBatch

__all__ = [
    "add_rms_norm",
    "copy_pages",
    "gelu_tanh_mul",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write",
    "silu_mul",
]

MAX_HEAD_DIM = 256

_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


def _is_bfloat16(name: str, tensor: Tensor) -> bool:
    flag = _IS_BFLOAT16.get(tensor.dtype)
    if flag is None:
        raise TypeError(f"{name} must be float32 or bfloat16, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    return flag


def _refuse(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> NoReturn:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    raise ValueError(
        f"{name} must be a contiguous CPU tensor of shape {shape}, got {tuple(tensor.shape)} with "
        f"strides {tensor.stride()} on {tensor.device}"
    )


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The address of `tensor`, which must be dense and exactly so."""
    if (
        tensor.dtype is not dtype
        or tensor.shape != shape
        or not tensor.is_contiguous()
        or not tensor.is_cpu
    ):
        _refuse(name, tensor, dtype, shape)
    return tensor.data_ptr()


def _strides(name: str, tensor: Tensor) -> tuple[int, int]:
    token_stride, head_stride, dense = tensor.stride()
    if dense != 1:
        raise ValueError(
            f"{name} must be dense in its last dimension, got strides {tensor.stride()}"
        )
    return token_stride, head_stride


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    bfloat16 = _is_bfloat16("x", x)
    rows, size = x.shape
    stride, dense = x.stride()
    if dense != 1:
        raise ValueError(f"x must be dense in its last dimension, got strides {x.stride()}")
    weight_at = _require("weight", weight, x.dtype, (size,))
    out = torch.empty((rows, size), dtype=x.dtype)
    _native.rms_norm(
        x.data_ptr(), 0, weight_at, out.data_ptr(), bfloat16, rows, size, stride, eps, weight_offset
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> Tensor:
    bfloat16 = _is_bfloat16("x", x)
    shape = rows, size = x.shape
    stride, dense = x.stride()
    if dense != 1:
        raise ValueError(f"x must be dense in its last dimension, got strides {x.stride()}")
    residual_at = _require("residual", residual, x.dtype, shape)
    weight_at = _require("weight", weight, x.dtype, (size,))
    out = torch.empty(shape, dtype=x.dtype)
    _native.rms_norm(
        x.data_ptr(),
        residual_at,
        weight_at,
        out.data_ptr(),
        bfloat16,
        rows,
        size,
        stride,
        eps,
        weight_offset,
    )
    return out


def rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    batch: AttentionBatch,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> None:
    bfloat16 = _is_bfloat16("q", q)
    dtype = q.dtype
    device, _, _, tokens, _, _, _, slots_at, positions_at = batch.layout
    if device != "cpu":
        raise ValueError(f"batch must be on the CPU, got {device}")
    num_pages, kv_heads, page_size, head_dim = pages_shape = k_pages.shape
    q_heads = q.shape[1]
    for name, tensor, heads in (("q", q, q_heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        if tensor.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype} like q, got {tensor.dtype}")
        if tensor.shape != (tokens, heads, head_dim):
            raise ValueError(
                f"{name} must have shape {(tokens, heads, head_dim)}, got {tuple(tensor.shape)}"
            )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    max_positions = half = cos_at = sin_at = 0
    if cos is not None and sin is not None:
        max_positions, half = cos.shape
        cos_at = _require("cos", cos, torch.float32, (max_positions, half))
        sin_at = _require("sin", sin, torch.float32, (max_positions, half))
        if 2 * half > head_dim:
            raise ValueError(f"cos must have at most {head_dim // 2} columns, got {half}")
    elif cos is not sin:
        raise ValueError("cos and sin must be both given or both None")
    _native.rotary_kv_write(
        q.data_ptr(),
        *_strides("q", q),
        k.data_ptr(),
        *_strides("k", k),
        v.data_ptr(),
        *_strides("v", v),
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        cos_at,
        sin_at,
        max_positions,
        half,
        positions_at,
        slots_at,
        _require("k_pages", k_pages, dtype, pages_shape),
        _require("v_pages", v_pages, dtype, pages_shape),
        num_pages,
        page_size,
        0 if q_norm is None else _require("q_norm", q_norm, dtype, (head_dim,)),
        0 if k_norm is None else _require("k_norm", k_norm, dtype, (head_dim,)),
        eps,
        weight_offset,
        bfloat16,
    )


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    bfloat16 = _is_bfloat16("q", q)
    dtype = q.dtype
    device, sequences, table_width, tokens, starts_at, contexts_at, table_at, _, _ = batch.layout
    if device != "cpu":
        raise ValueError(f"batch must be on the CPU, got {device}")
    num_pages, kv_heads, page_size, head_dim = pages_shape = k_pages.shape
    shape = q_tokens, q_heads, q_dim = q.shape
    if q_tokens != tokens or q_dim != head_dim or q_heads % kv_heads:
        raise ValueError(
            f"q must have shape ({tokens}, a multiple of {kv_heads}, {head_dim}), "
            f"got {tuple(shape)}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    if window < 0 or soft_cap < 0:
        raise ValueError(f"window and soft_cap must be at least 0, got {window} and {soft_cap}")
    out = torch.empty(shape, dtype=dtype)
    _native.paged_attention(
        q.data_ptr(),
        *_strides("q", q),
        out.data_ptr(),
        _require("k_pages", k_pages, dtype, pages_shape),
        _require("v_pages", v_pages, dtype, pages_shape),
        num_pages,
        kv_heads,
        page_size,
        head_dim,
        q_heads // kv_heads,
        starts_at,
        contexts_at,
        table_at,
        sequences,
        table_width,
        tokens,
        scale,
        soft_cap,
        window,
        bfloat16,
    )
    return out


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    bfloat16 = _is_bfloat16("gate_up", gate_up)
    rows, width = gate_up.shape
    stride, dense = gate_up.stride()
    if dense != 1 or width % 2:
        raise ValueError(
            "gate_up must be dense in its last dimension, whose size is even; got shape "
            f"{tuple(gate_up.shape)} with strides {gate_up.stride()}"
        )
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    _native.gated(gate_up.data_ptr(), out.data_ptr(), bfloat16, gelu, rows, size, stride)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, True)


def copy_pages(caches: Sequence[KVCache], copies: Tensor) -> None:
    first = caches[0].storage
    layers, two, _, heads, page_size, head_dim = first.shape
    addresses = []
    for index, cache in enumerate(caches):
        num_pages = cache.num_pages
        shape = (layers, two, num_pages, heads, page_size, head_dim)
        address = _require(f"caches[{index}].storage", cache.storage, first.dtype, shape)
        addresses.append((address, num_pages))
    num_copies = copies.shape[0]
    _native.copy_pages(
        addresses,
        layers * two,
        heads,
        page_size,
        head_dim * first.dtype.itemsize,
        _require("copies", copies, torch.int32, (num_copies, 5)),
        num_copies,
    )
