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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.backend import Backend, HeadNorms, Rotation
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows
from aioserve.ops.checks import (
    check_bounds,
    check_gate_up,
    check_head_norms,
    check_qkv,
    check_rotation,
    check_rows,
    check_tensor,
)
from aioserve.ops.draws import RowSampler, row_error
from aioserve.ops.kv_cache import KVCache, lazy_memory, storage_shape
from aioserve.ops.linear import Linear
from aioserve.ops.philox import uniforms

__all__ = ["NativeBackend"]

MAX_HEAD_DIM = 256
CPU = torch.device("cpu")

_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


@dataclass(slots=True, frozen=True)
class NativeKVCache(KVCache):
    """KV pages of the process's own memory."""

    pages: _native.KVPages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        KVCache.__post_init__(self)
        storage = self.storage
        bfloat16 = _is_bfloat16("storage", storage)
        if not storage.is_cpu:
            raise ValueError(f"storage must be on the CPU, got {storage.device}")
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
        self.device: torch.device = CPU
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
            host.logit_rows,
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
        check_tensor("residual", residual, x.dtype, x.shape, CPU)
        return _rms_norm(x, residual.data_ptr(), weight, eps, weight_offset)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        batch: Batch,
        kv: KVCache,
        layer: int,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> None:
        q_heads = check_qkv(qkv, batch, kv, layer, CPU)
        head_dim, dtype = kv.head_dim, qkv.dtype
        cos_at = sin_at = max_positions = half = q_norm_at = k_norm_at = 0
        eps = weight_offset = 0.0
        if rotation is not None:
            max_positions, half = check_rotation(rotation, head_dim, CPU)
            cos_at, sin_at = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        if norms is not None:
            check_head_norms(norms, head_dim, dtype, CPU)
            q_norm_at, k_norm_at = norms.query.data_ptr(), norms.key.data_ptr()
            eps, weight_offset = norms.eps, norms.weight_offset
        _native.rotary_kv_write(
            _own_arrays(batch),
            _own_pages(kv),
            layer,
            qkv.data_ptr(),
            qkv.stride(0),
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
        logit_rows_only: bool = False,
    ) -> Tensor:
        q_heads = check_qkv(qkv, batch, kv, layer, CPU)
        check_bounds(window, soft_cap)
        rows = (batch.logit_rows if logit_rows_only else qkv).shape[0]
        out = torch.empty((rows, q_heads * kv.head_dim), dtype=qkv.dtype)
        _native.paged_attention(
            _own_arrays(batch),
            _own_pages(kv),
            layer,
            qkv.data_ptr(),
            qkv.stride(0),
            q_heads,
            out.data_ptr(),
            scale,
            soft_cap,
            window,
            logit_rows_only,
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


def _is_bfloat16(name: str, tensor: Tensor) -> bool:
    flag = _IS_BFLOAT16.get(tensor.dtype)
    if flag is None:
        raise TypeError(f"{name} must be float32 or bfloat16, got {tensor.dtype}")
    return flag


def _rms_norm(
    x: Tensor, residual_at: int, weight: Tensor, eps: float, weight_offset: float
) -> Tensor:
    bfloat16 = _is_bfloat16("x", x)
    check_rows("x", x, CPU)
    rows, size = x.shape
    check_tensor("weight", weight, x.dtype, (size,), CPU)
    out = torch.empty((rows, size), dtype=x.dtype)
    _native.rms_norm(
        x.data_ptr(),
        residual_at,
        weight.data_ptr(),
        out.data_ptr(),
        bfloat16,
        rows,
        size,
        x.stride(0),
        eps,
        weight_offset,
    )
    return out


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    bfloat16 = _is_bfloat16("gate_up", gate_up)
    check_gate_up(gate_up, CPU)
    rows, size, stride = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.stride(0)
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    _native.gated(gate_up.data_ptr(), out.data_ptr(), bfloat16, gelu, rows, size, stride)
    return out
