"""Every op in C++ for CPUs, float32 and bfloat16; `aioserve.ops.backend` documents each.

Checks shapes, dtypes and strides, then hands addresses to `aioserve._native`, which releases the
GIL. All tensors of a call live on the CPU and share one dtype (rotary tables: float32).

Each result row depends only on its own sequence and position: not on its neighbours in the batch,
the number of threads, the page size, or where a prefill was cut into chunks, all to the last bit.
Another instruction set may round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.backend import Backend, HeadNorms, Rotation
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows
from aioserve.ops.draws import RowSampler, row_error
from aioserve.ops.kv_cache import KVCache, lazy_memory, storage_shape
from aioserve.ops.linear import Linear
from aioserve.ops.philox import uniforms

__all__ = ["NativeBackend"]

MAX_HEAD_DIM = 256

_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


@dataclass(slots=True, frozen=True)
class NativeKVCache(KVCache):
    """KV pages of the process's own memory."""

    pages: _native.KVPages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        KVCache.__post_init__(self)
        storage = self.storage
        bfloat16 = _is_bfloat16("storage", storage)
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}")
        layers, _, num_pages, heads, page_size, head_dim = storage.shape
        pages = _native.KVPages(
            storage.data_ptr(), layers, num_pages, heads, page_size, head_dim, bfloat16
        )
        object.__setattr__(self, "pages", pages)


@dataclass(slots=True, frozen=True)
class NativeBatch(Batch):
    """A batch whose arrays were checked once, for all layers."""

    arrays: _native.Batch


class NativeLinear(Linear):
    """C++ on the ops' own thread pool and instruction set, one layout for decode and prefill alike.

    The packed copy is all that is kept. A row's result depends on that row alone, to the last bit:
    not on how many rows there are, its place among them, threads, or other rows' NaNs. Every output
    is one chain of multiply-adds in the order of the inputs; float32 results are the sums as they
    are. `benchmarks/linear.py` prints how it compares with torch.
    """

    __slots__ = ("_apply", "_float32", "_item_bytes", "_packed")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight, bias, out_dtype=out_dtype)
        self._float32 = self.out_dtype is torch.float32
        self._item_bytes = weight.element_size()
        bias = None if bias is None else bias.detach().contiguous()
        self._packed = _native.PackedWeight(
            weight.data_ptr(),
            self.out_features,
            self.in_features,
            weight.stride(0) * self._item_bytes,
            weight.stride(1) * self._item_bytes,
            0 if bias is None else bias.data_ptr(),
            weight.dtype is torch.bfloat16,
        )
        self._apply = self._packed.apply
        self.num_bytes: int = self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = x.shape if x.dim() == 2 else (0, -1)
        if (
            columns != self.in_features
            or x.dtype is not self.dtype
            or not x.is_cpu
            or (x.stride(1) != 1 and columns != 1)
        ):
            self._refuse(x)
        y = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        row_bytes = x.stride(0) * self._item_bytes
        self._apply(x.data_ptr(), rows, row_bytes, y.data_ptr(), self._float32)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        if not ids.is_cpu:
            raise ValueError(f"ids must be on the CPU, got {ids.device}")
        out = torch.empty((ids.shape[0], self.in_features), dtype=self.dtype)
        self._packed.gather(ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


class NativeBackend(Backend):
    """The CPUs of this process."""

    name = "native"

    def __init__(self) -> None:
        self.device: torch.device = torch.device("cpu")
        self._sampler: RowSampler | None = None

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> NativeLinear:
        return NativeLinear(weight, bias, out_dtype=out_dtype)

    def allocate_kv(self, *, dtype: torch.dtype, **sizes: int) -> NativeKVCache:
        """Memory that is touched only when a page is first written."""
        return NativeKVCache(lazy_memory(storage_shape(**sizes), dtype))

    def prepare(self, host: HostBatch, kv: KVCache, last_tokens: Tensor) -> NativeBatch:
        arrays = _native.Batch(
            host.query_start,
            host.context_lens,
            host.page_table,
            host.token_locations,
            host.positions,
            _own_pages(kv),
        )
        token_ids = torch.from_numpy(host.token_ids)
        if len(host.pending_rows):
            token_ids = token_ids.clone()
            pending = last_tokens[torch.from_numpy(host.pending_slots)]
            token_ids[torch.from_numpy(host.pending_rows)] = pending
        return NativeBatch(
            token_ids=token_ids,
            positions=torch.from_numpy(host.positions),
            logit_rows=torch.from_numpy(host.logit_rows),
            max_context=host.max_context,
            arrays=arrays,
        )

    def copy_pages(self, caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
        if copies.dtype != np.int32 or copies.ndim != 2 or copies.shape[1] != 5:
            raise ValueError(
                f"copies must be int32 of shape [N, 5], got {copies.dtype} {copies.shape}"
            )
        _native.copy_pages([_own_pages(cache) for cache in caches], np.ascontiguousarray(copies))

    def draw(self, logits: Tensor, rows: SampleRows, last_tokens: Tensor) -> Drawn:
        """Each row is worked out by itself, in the same operations whatever its neighbours and its
        place in memory, so its token is the same in any batch."""
        rows.check_logits(logits)
        num_rows, vocab = logits.shape
        values = logits.numpy()
        token_ids = values.argmax(axis=1)
        # argmax stops at the first NaN, so the value it finds tells of every kind of bad row.
        largest = values[np.arange(num_rows), token_ids]
        errors = {}
        for row in np.flatnonzero(~np.isfinite(largest)).tolist():
            errors[row] = row_error(float(largest[row])) or ""
            token_ids[row] = 0
        drawn = np.flatnonzero(rows.temperatures > 0)
        if len(drawn):
            noise = uniforms(rows.seeds[drawn], rows.positions[drawn]).tolist()
            sampler = self._sampler
            if sampler is None or sampler.vocab != vocab:
                sampler = self._sampler = RowSampler(vocab)
            for i, uniform in zip(drawn.tolist(), noise, strict=True):
                if i in errors:
                    continue
                token_ids[i] = sampler.draw(
                    values[i],
                    largest[i],
                    uniform,
                    temperature=float(rows.temperatures[i]),
                    top_k=int(rows.top_ks[i]),
                    top_p=float(rows.top_ps[i]),
                )
        tokens = torch.from_numpy(token_ids)
        last_tokens[torch.from_numpy(rows.slots)] = tokens
        return Drawn(tokens, errors)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
        return _rms_norm(x, 0, weight, eps, weight_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
    ) -> Tensor:
        residual_at = _require("residual", residual, x.dtype, x.shape)
        return _rms_norm(x, residual_at, weight, eps, weight_offset)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        batch: Batch,
        kv: KVCache,
        layer: int,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> None:
        row_stride, q_heads = _check_qkv(qkv, batch, kv, layer)
        head_dim, dtype = kv.head_dim, qkv.dtype
        cos_at = sin_at = max_positions = half = q_norm_at = k_norm_at = 0
        eps = weight_offset = 0.0
        if rotation is not None:
            max_positions, half = shape = rotation.cos.shape
            cos_at = _require("cos", rotation.cos, torch.float32, shape)
            sin_at = _require("sin", rotation.sin, torch.float32, shape)
            if 2 * half > head_dim:
                raise ValueError(f"cos must have at most {head_dim // 2} columns, got {half}")
        if norms is not None:
            q_norm_at = _require("norms.query", norms.query, dtype, (head_dim,))
            k_norm_at = _require("norms.key", norms.key, dtype, (head_dim,))
            eps, weight_offset = norms.eps, norms.weight_offset
        _native.rotary_kv_write(
            _own_arrays(batch),
            _own_pages(kv),
            layer,
            qkv.data_ptr(),
            row_stride,
            q_heads,
            cos_at,
            sin_at,
            max_positions,
            half,
            q_norm_at,
            k_norm_at,
            eps,
            weight_offset,
        )

    def paged_attention(
        self,
        qkv: Tensor,
        batch: Batch,
        kv: KVCache,
        layer: int,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        row_stride, q_heads = _check_qkv(qkv, batch, kv, layer)
        if window < 0 or soft_cap < 0:
            raise ValueError(f"window and soft_cap must be at least 0, got {window} and {soft_cap}")
        out = torch.empty((qkv.shape[0], q_heads * kv.head_dim), dtype=qkv.dtype)
        _native.paged_attention(
            _own_arrays(batch),
            _own_pages(kv),
            layer,
            qkv.data_ptr(),
            row_stride,
            q_heads,
            out.data_ptr(),
            scale,
            soft_cap,
            window,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, True)


def _own_pages(kv: KVCache) -> _native.KVPages:
    if not isinstance(kv, NativeKVCache):
        raise TypeError(f"kv must be one that this backend allocated, got {type(kv).__name__}")
    return kv.pages


def _own_arrays(batch: Batch) -> _native.Batch:
    if not isinstance(batch, NativeBatch):
        raise TypeError(f"batch must be one that this backend prepared, got {type(batch).__name__}")
    return batch.arrays


def _check_qkv(qkv: Tensor, batch: Batch, kv: KVCache, layer: int) -> tuple[int, int]:
    """The distance of its rows in elements, and the number of query heads."""
    if qkv.dtype is not kv.storage.dtype:
        raise TypeError(f"qkv must be {kv.dtype} as the KV pages, got {qkv.dtype}")
    tokens, width = qkv.shape
    row_stride, dense = qkv.stride()
    q_heads, odd = divmod(width, kv.head_dim)
    q_heads -= 2 * kv.num_kv_heads
    if (
        tokens != batch.positions.shape[0]
        or q_heads < 1
        or q_heads % kv.num_kv_heads
        or odd
        or dense != 1
        or not qkv.is_cpu
    ):
        raise ValueError(
            f"qkv must have shape ({batch.positions.shape[0]}, (Hq + 2 * {kv.num_kv_heads}) * "
            f"{kv.head_dim}), Hq a multiple of {kv.num_kv_heads}, with dense rows on the CPU; got "
            f"{tuple(qkv.shape)} with strides {qkv.stride()} on {qkv.device}"
        )
    if not 0 <= layer < kv.num_layers:
        raise ValueError(f"layer must be from 0 to {kv.num_layers - 1}, got {layer}")
    return row_stride, q_heads


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
        f"{name} must be a contiguous CPU tensor of shape {tuple(shape)}, got "
        f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
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


def _rms_norm(
    x: Tensor, residual_at: int, weight: Tensor, eps: float, weight_offset: float
) -> Tensor:
    bfloat16 = _is_bfloat16("x", x)
    rows, size = x.shape
    stride, dense = x.stride()
    if dense != 1:
        raise ValueError(f"x must be dense in its last dimension, got strides {x.stride()}")
    weight_at = _require("weight", weight, x.dtype, (size,))
    out = torch.empty((rows, size), dtype=x.dtype)
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
