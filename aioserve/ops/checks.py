"""Checks of arguments that all backends share, so that all refuse alike.

Each raises TypeError or ValueError naming the argument. Backends add the limits of their kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.ops.batch import Batch, HostBatch
from aioserve.ops.kv_cache import KVCache
from aioserve.paging.layout import first_seen
from aioserve.paging.pages import capacity_tokens, full_pages, pages_for

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AttentionKind",
    "HeadNorms",
    "KVLayer",
    "LayerNorm",
    "RMSNorm",
    "Rotation",
    "check_attention",
    "check_batch",
    "check_columns",
    "check_copies",
    "check_gate_up",
    "check_head_norms",
    "check_latent_write",
    "check_merge",
    "check_norm",
    "check_qkv",
    "check_rotation",
    "check_rows",
    "check_tensor",
    "check_window",
    "own",
]

Kind = TypeVar("Kind")


Activation = Literal["gelu_tanh", "gelu", "relu_squared"]
"""Activation of a layer without a gate.

- gelu_tanh: gelu in its tanh approximation.
- gelu: gelu by the error function (Hendrycks and Gimpel, "Gaussian error linear units", 2016).
- relu_squared: `max(x, 0) ** 2` (So et al., "Primer", 2021).
"""

ACTIVATIONS: tuple[Activation, ...] = ("gelu_tanh", "gelu", "relu_squared")
"""All activations, in the order of `aioserve::ops::Activation`."""


class Rotation(NamedTuple):
    """Tables of a rotary embedding: float32 `[positions, R / 2]` each, rows indexed by position."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    """True if dimensions 2 i and 2 i + 1 turn together, False if i and i + R / 2 do."""
    query_scale: Tensor | None = None
    """Factors on rotated queries, float32 `[positions]`; None for no factors."""


class RMSNorm(NamedTuple):
    """`x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` of rows `[H]`, weight `[H]`.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    weight: Tensor
    eps: float
    weight_offset: float = 0.0


class LayerNorm(NamedTuple):
    """Ba, Kiros and Hinton, "Layer Normalization", 2016, of rows `[H]`; weight and bias `[H]`."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class HeadNorms(NamedTuple):
    """`RMSNorm` of each query and key head, with weights `[D]`."""

    query: Tensor
    key: Tensor
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionKind:
    """Rule of attention, which layers of one kind share; a layer with sinks has a kind of its own.

    Raises ValueError for a window or a soft cap below 0.
    """

    scale: float
    """Factor on the dot products."""
    window: int = 0
    """Number of tokens that a query sees, itself included; 0 for all. A token at position p attends
    keys j <= p and, with a window, only j > p - window."""
    soft_cap: float = 0.0
    """Cap c: with c > 0 a score s becomes c * tanh(s / c). 0 for no cap."""
    sinks: Tensor | None = None
    """Learned score of each query head, float32 `[Hq]`, that takes its share of the weights and has
    no value. None for no sinks.

    It joins the sum that weights are divided by, neither scaled nor capped (GPT-OSS; Xiao et al.,
    "Efficient streaming language models with attention sinks", 2024).
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionKind) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[float, int, float, int]:
        return self.scale, self.window, self.soft_cap, id(self.sinks)

    def __post_init__(self) -> None:
        if not (self.window >= 0 and self.soft_cap >= 0):
            raise ValueError(
                f"window and soft_cap must be at least 0, got {self.window} and {self.soft_cap}"
            )


class KVLayer(NamedTuple):
    """One layer of KV pages, and the batch whose keys and values it holds."""

    batch: Batch
    kv: KVCache
    layer: int


def own(name: str, value: object, kind: type[Kind], made: str) -> Kind:
    """Check that a value is one that the backend has `made`: allocated, prepared."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be one that this backend {made}, got {type(value).__name__}")
    return value


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    """Check that the tensor is dense and has exactly this device, dtype and shape."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be contiguous, of shape {tuple(shape)} on {device}; got {_shown(tensor)}"
        )


def check_rows(name: str, x: Tensor, device: torch.device, shape: str = "[T, H]") -> None:
    """Check that x has two dimensions, and dense rows of floating point."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.dim() != 2 or x.stride(1) != 1 or x.device != device:
        _refuse_rows(name, x, shape, device)


def check_norm(
    x: Tensor, norm: RMSNorm | LayerNorm, residual: Tensor | None, device: torch.device
) -> tuple[int, int]:
    """Check rows, weights and residual; return the shape of x, which is slow to ask for."""
    check_rows("x", x, device)
    dtype, (rows, size) = x.dtype, x.shape
    check_tensor("weight", norm.weight, dtype, (size,), device)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        check_tensor("bias", norm.bias, dtype, (size,), device)
    if residual is not None:
        check_tensor("residual", residual, dtype, (rows, size), device)
    return rows, size


def check_columns(x: Tensor, norm: RMSNorm, first: int, device: torch.device) -> Tensor:
    """Check that x `[T, N]` has the columns of a norm from `first` on; return them."""
    check_rows("x", x, device, "[T, N]")
    end = first + norm.weight.shape[0]
    if not 0 <= first < end <= x.shape[1]:
        raise ValueError(f"first must leave columns {first} to {end} within {x.shape[1]}")
    return x[:, first:end]


def check_gate_up(gate_up: Tensor, device: torch.device) -> None:
    check_rows("gate_up", gate_up, device, "[T, 2 * I]")
    if gate_up.shape[1] % 2:
        _refuse_rows("gate_up", gate_up, "[T, 2 * I]", device)


def check_qkv(qkv: Tensor, at: KVLayer, device: torch.device) -> int:
    """Check queries, keys and values, or only queries for latent pages. Return the number of query
    heads."""
    batch, kv, layer = at
    others = 0 if kv.latent_rank else 2 * kv.num_kv_heads
    if qkv.dtype is not kv.storage.dtype:
        raise TypeError(f"qkv must be {kv.dtype} as the KV pages, got {qkv.dtype}")
    tokens = batch.positions.shape[0]
    rows, width = qkv.shape if qkv.dim() == 2 else (-1, 0)
    q_heads, odd = divmod(width, kv.head_dim)
    q_heads -= others
    if (
        rows != tokens
        or q_heads < 1
        or q_heads % kv.num_kv_heads
        or odd
        or qkv.stride(1) != 1
        or qkv.device != device
    ):
        heads = f"(Hq + {others}) * {kv.head_dim}"
        multiple = f"Hq a multiple of {kv.num_kv_heads}"
        _refuse_rows("qkv", qkv, f"({tokens}, {heads}), {multiple},", device)
    if not 0 <= layer < kv.num_layers:
        raise ValueError(f"layer must be from 0 to {kv.num_layers - 1}, got {layer}")
    return q_heads


def check_attention(
    kind: AttentionKind,
    log_sum_exp: Tensor | None,
    rows: int,
    q_heads: int,
    device: torch.device,
) -> None:
    """Check sinks, and memory for the log-sum-exp of `rows` rows."""
    if kind.sinks is not None:
        check_tensor("sinks", kind.sinks, torch.float32, (q_heads,), device)
    if log_sum_exp is not None:
        check_tensor("log_sum_exp", log_sum_exp, torch.float32, (rows, q_heads), device)


def check_merge(
    out: Tensor,
    log_sum_exp: Tensor,
    part: Tensor,
    part_log_sum_exp: Tensor,
    device: torch.device,
) -> int:
    """Check two results of attention from the same queries; return the size of a head."""
    check_rows("out", out, device, "[T, Hq * D]")
    rows, heads = log_sum_exp.shape if log_sum_exp.dim() == 2 else (-1, 0)
    head_dim, odd = divmod(out.shape[1], heads) if heads else (0, 1)
    if rows != out.shape[0] or odd or not head_dim:
        raise ValueError(
            f"log_sum_exp must have shape ({out.shape[0]}, Hq) with Hq a divisor of "
            f"{out.shape[1]}, got {tuple(log_sum_exp.shape)}"
        )
    check_tensor("out", out, out.dtype, out.shape, device)
    check_tensor("part", part, out.dtype, out.shape, device)
    for name, sums in (("log_sum_exp", log_sum_exp), ("part_log_sum_exp", part_log_sum_exp)):
        check_tensor(name, sums, torch.float32, (rows, heads), device)
    return head_dim


def check_latent_write(
    queries: Tensor,
    latents: Tensor,
    at: KVLayer,
    rotation: Rotation,
    norm: RMSNorm,
    device: torch.device,
) -> int:
    """Check what is written to latent pages; return the number of query heads."""
    kv = at.kv
    if not kv.latent_rank:
        raise ValueError("at: its pages hold keys and values, not latents")
    q_heads = check_qkv(queries, at, device)
    if latents.dtype is not kv.dtype:
        raise TypeError(f"latents must be {kv.dtype} as the KV pages, got {latents.dtype}")
    check_rows("latents", latents, device, "[T, D]")
    shape = queries.shape[0], kv.head_dim
    if latents.shape != shape:
        _refuse_rows("latents", latents, str(shape), device)
    check_tensor("norm.weight", norm.weight, kv.dtype, (kv.latent_rank,), device)
    if rotation.query_scale is not None:
        raise ValueError("rotation: queries of latents have no query_scale")
    return q_heads


def check_rotation(rotation: Rotation, head_dim: int, device: torch.device) -> tuple[int, int]:
    """Check the tables; return their shape."""
    shape = rotation.cos.shape
    if len(shape) != 2:
        raise ValueError(f"cos must have shape [positions, R / 2], got {tuple(shape)}")
    for name, table in (("cos", rotation.cos), ("sin", rotation.sin)):
        check_tensor(name, table, torch.float32, shape, device)
    if rotation.query_scale is not None:
        check_tensor("query_scale", rotation.query_scale, torch.float32, shape[:1], device)
    positions, half = shape
    if 2 * half > head_dim:
        raise ValueError(f"cos must have at most {head_dim // 2} columns, got {half}")
    return positions, half


def check_head_norms(
    norms: HeadNorms, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor("norms.query", norms.query, dtype, (head_dim,), device)
    check_tensor("norms.key", norms.key, dtype, (head_dim,), device)


def check_batch(host: HostBatch, kv: KVCache) -> None:
    """Check that the arrays agree with each other and with the pages."""
    tokens = len(host.positions)
    if host.query_start[0] != 0 or host.query_start[-1] != tokens:
        raise ValueError(f"batch: query_start must run from 0 to the number of tokens, {tokens}")
    tables, groups = host.page_table, kv.layout.groups
    if len(tables) != len(groups):
        raise ValueError(
            f"batch: has page tables of {len(tables)} groups, and the pages are of {len(groups)}"
        )
    ends = capacity_tokens(tables.shape[2], kv.page_size)
    for i, (count, context) in enumerate(
        zip(np.diff(host.query_start).tolist(), host.context_lens.tolist(), strict=True)
    ):
        if count < 0:
            raise ValueError(f"batch: sequence {i} has a negative number of query tokens")
        if count > context:
            raise ValueError(
                f"batch: sequence {i} has {count} query tokens in a context of {context}"
            )
        if context > ends:
            raise ValueError(
                f"batch: sequence {i} has a context of {context}, but its page table ends at {ends}"
            )
        end = pages_for(context, kv.page_size)
        for group, table in zip(groups, tables, strict=True):
            first = full_pages(first_seen(context - count, group.window), kv.page_size)
            for page in table[i, first:end].tolist():
                if not 0 <= page < kv.num_pages:
                    raise ValueError(f"batch: sequence {i} names page {page} of {kv.num_pages}")
    num_locations = capacity_tokens(kv.num_pages, kv.page_size)
    outside = (host.token_locations < 0) | (host.token_locations >= num_locations)
    for group, i in np.argwhere(outside).tolist():
        raise ValueError(
            f"batch: token_locations[{group}, {i}] is {host.token_locations[group, i]}, outside "
            f"the {num_locations} locations of the pages"
        )
    for i in np.flatnonzero(host.positions < 0):
        raise ValueError(f"batch: positions[{i}] is {host.positions[i]}")
    for i in np.flatnonzero((host.logit_rows < 0) | (host.logit_rows >= tokens)):
        raise ValueError(f"batch: logit_rows[{i}] is {host.logit_rows[i]} of {tokens} tokens")


def check_window(kv: KVCache, layer: int, window: int) -> None:
    """Check that the pages of a layer keep what its window sees."""
    kept = kv.layout.groups[kv.places[layer][0]].window
    if kept and not 0 < window <= kept:
        raise ValueError(
            f"window must be from 1 to the {kept} positions that the pages of layer {layer} keep, "
            f"got {window}"
        )


def check_copies(caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
    """Check that caches, pages and tokens exist."""
    for i, copy in enumerate(copies.tolist()):
        for name, cache, page in (("source", *copy[:2]), ("target", *copy[2:4])):
            if not 0 <= cache < len(caches):
                raise ValueError(f"copies[{i}] has {name} cache {cache} of {len(caches)}")
            if not 0 <= page < caches[cache].num_pages:
                limit = caches[cache].num_pages
                raise ValueError(f"copies[{i}] has {name} page {page} of {limit}")
        if not 1 <= copy[4] <= caches[0].page_size:
            raise ValueError(
                f"copies[{i}] has {copy[4]} tokens; a page holds 1 to {caches[0].page_size}"
            )


def _refuse_rows(name: str, x: Tensor, shape: str, device: torch.device) -> None:
    raise ValueError(f"{name} must have shape {shape} with dense rows on {device}; got {_shown(x)}")


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
