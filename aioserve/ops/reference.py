"""Every op in plain torch: the definition that faster backends are tested against.

Runs on any device and floating dtype. Arithmetic is in float32 (float64 stays float64); results
are rounded once, to the dtype of the first argument. Written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

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


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dimension.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. `x` is `[..., H]`, `weight`
    `[H]`; returns the shape and dtype of `x`.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (_wide(weight) + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> Tensor:
    """Add `x` to `residual` in place, then return `rms_norm(residual, ...)`; both `[T, H]`.

    The norm sees the sum as it was stored, rounded to the dtype of `residual`.
    """
    residual.copy_(_wide(residual) + _wide(x))
    return rms_norm(residual, weight, eps, weight_offset=weight_offset)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of D dimensions, pairing `i` with `i + R / 2`; x `[T, H, D]` wide."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


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
    """Normalise and rotate queries in place; write normalised, rotated keys and values to pages.

    Rotary embedding after Su et al., "RoFormer", 2021, in the half-split order of GPT-NeoX.

    Args:
        q: `[T, Hq, D]`, changed in place. Like k and v it may be a strided view (of a fused QKV
            output) as long as its last dimension is dense.
        k: `[T, Hk, D]`, unchanged.
        v: `[T, Hk, D]`, unchanged.
        cos, sin: float32 `[max_positions, R / 2]` with `R <= D`, rows indexed by position; both
            None for a model without rotary embedding.
        batch: `positions` and `token_locations` are used.
        k_pages, v_pages: `[num_pages, Hk, page_size, D]`; only the batch's locations change.
        q_norm, k_norm: `[D]` weights of a per-head RMS norm before the rotation, or None.
        eps, weight_offset: of those norms, as in `rms_norm`.
    """
    page_size = k_pages.shape[2]
    new_q, new_k = _wide(q), _wide(k)
    if q_norm is not None:
        new_q = rms_norm(new_q, q_norm, eps, weight_offset=weight_offset)
    if k_norm is not None:
        new_k = rms_norm(new_k, k_norm, eps, weight_offset=weight_offset)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be both given or both None")
    if cos is not None and sin is not None:
        rows = batch.positions.long()
        new_q = _rotate(new_q, cos[rows], sin[rows])
        new_k = _rotate(new_k, cos[rows], sin[rows])
    q.copy_(new_q)
    pages = torch.div(batch.token_locations, page_size, rounding_mode="floor")
    offsets = batch.token_locations - pages * page_size
    k_pages[pages, :, offsets] = new_k.to(k_pages.dtype)
    v_pages[pages, :, offsets] = v.to(v_pages.dtype)


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
    """Causal attention of every query token to the cached keys and values of its sequence.

    A token at position p attends keys j <= p and, where `window` > 0, only j > p - window. Query
    head h reads KV head `h // (Hq // Hk)`. With `soft_cap` c > 0 a score s becomes c * tanh(s / c).

    Args:
        q: `[T, Hq, D]`; may be a strided view with a dense last dimension.
        k_pages, v_pages: `[num_pages, Hk, page_size, D]`, this step's tokens already written.
        batch: prefill chunks and decodes in any mixture.
        scale: factor on the dot products.
        window: tokens a query sees, itself included; 0 for all.
        soft_cap: 0 for none.

    Returns:
        `[T, Hq, D]`, contiguous.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = q_heads // kv_heads
    out = torch.empty((tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    starts = batch.query_start.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        pages = batch.page_table[row, : -(-context // page_size)].long()
        keys = _wide(k_pages[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :context])
        values = _wide(v_pages[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :context])
        queries = _wide(q[start:stop]).transpose(0, 1)
        scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_at = torch.arange(context, device=q.device)
        query_at = torch.arange(context - (stop - start), context, device=q.device)[:, None]
        hidden = key_at > query_at
        if window > 0:
            hidden |= key_at <= query_at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        attended = weights @ values.repeat_interleave(group, 0)
        out[start:stop] = attended.transpose(0, 1).to(q.dtype)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * I]` holding gate then up; returns `[T, I]`."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, the tanh approximation, of `[T, 2 * I]`; returns `[T, I]`."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def copy_pages(caches: Sequence[KVCache], copies: Tensor) -> None:
    """Copy keys and values of all layers from page to page, one copy after the other.

    Args:
        caches: alike in everything but their number of pages.
        copies: int32 `[N, 5]` on the CPU, in rows (source cache, source page, target cache, target
            page, tokens): an index of `caches`, a page of that one, twice, and how many tokens from
            the start of the page on. What the target page holds beyond them stays.
    """
    for source_cache, source, target_cache, target, tokens in copies.tolist():
        pages = caches[source_cache].storage[:, :, source]
        caches[target_cache].storage[:, :, target, :, :tokens] = pages[:, :, :, :tokens]
