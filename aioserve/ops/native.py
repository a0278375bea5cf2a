"""Every op in C++ for CPUs, float32 and bfloat16; `aioserve.ops.backend` documents each.

Checks shapes, dtypes and strides, then hands addresses to `aioserve._native`, which releases the
GIL. All tensors of a call live on the CPU and share one dtype (rotary tables: float32).

Each result row depends only on its own sequence and position, to the last bit. Neighbours in the
batch, the number of threads, the page size, and the cuts of a prefill into chunks don't matter.
Another instruction set may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.formats.routing import Routing
from aioserve.formats.weights import NATIVE
from aioserve.ops.backend import (
    AttentionKind,
    Backend,
    HeadNorms,
    KVLayer,
    LayerNorm,
    RMSNorm,
    Rotation,
)
from aioserve.ops.batch import Drawn, HostBatch, SampleRows
from aioserve.ops.checks import (
    ACTIVATIONS,
    Activation,
    check_attention,
    check_gate_up,
    check_head_norms,
    check_latent_write,
    check_merge,
    check_norm,
    check_qkv,
    check_rotation,
    check_rows,
    check_tensor,
)
from aioserve.ops.experts import ExpertGate
from aioserve.ops.kv_cache import KVCache, KVShape
from aioserve.ops.layer_ops import LayerOps
from aioserve.ops.linear import HeldWeight, Linear
from aioserve.ops.native_experts import NativeMixture
from aioserve.ops.native_program import NativeProgram
from aioserve.ops.native_sampler import Largest, NativeSampler
from aioserve.ops.native_types import (
    CPU,
    NativeBatch,
    NativeKVCache,
    NativeLinear,
    NativePerHead,
    address,
    is_bfloat16,
    own_arrays,
    own_pages,
)

__all__ = ["NativeBackend"]


class NativeBackend(Backend):
    """The CPUs of this process."""

    name = "native"
    formats = NATIVE

    def __init__(self) -> None:
        self.device: torch.device = CPU
        self._sampler = NativeSampler()

    def linear(
        self,
        weight: HeldWeight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> NativeLinear:
        if isinstance(weight, Tensor):
            return NativeLinear(weight, bias, out_dtype=out_dtype)
        if not isinstance(weight, _native.LinearKernel):
            raise TypeError(f"the backend native computes no {type(weight).__name__}")
        if bias is not None:
            raise TypeError("bias must be None: it is packed with the weight")
        return NativeLinear.of_packed(weight, out_dtype)

    def mixture(
        self,
        routing: Routing,
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> NativeMixture:
        return NativeMixture(routing, ups, downs, gate=gate, correction=correction)

    def allocate_kv(self, shape: KVShape) -> NativeKVCache:
        """Allocate KV pages in memory that is resident once a page is written or prefaulted."""
        return NativeKVCache(shape)

    def prepare(self, host: HostBatch, kv: KVCache, last_tokens: Tensor) -> NativeBatch:
        arrays = _native.Batch(
            host.query_start,
            host.context_lens,
            host.page_table,
            host.token_locations,
            host.positions,
            host.logit_rows,
            own_pages(kv),
        )
        token_ids = host.token_ids
        if len(host.pending_rows):
            token_ids = token_ids.copy()
            token_ids[host.pending_rows] = last_tokens.numpy()[host.pending_slots]
        return NativeBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(host.positions),
            logit_rows=torch.from_numpy(host.logit_rows),
            end_position=host.end_position,
            arrays=arrays,
        )

    def copy_pages(self, caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
        if copies.dtype != np.int32 or copies.ndim != 2 or copies.shape[1] != 5:
            raise ValueError(
                f"copies must be int32 of shape [N, 5], got {copies.dtype} {copies.shape}"
            )
        _native.copy_pages([own_pages(cache) for cache in caches], np.ascontiguousarray(copies))

    def draw(self, logits: Tensor, rows: SampleRows, last_tokens: Tensor) -> Drawn:
        logits, largest = self._with_largest(logits, rows)
        return self._sampler.draw(largest, logits.numpy(), rows, last_tokens)

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Compute `Backend.probabilities`, deciding which tokens are kept by the code of `draw`."""
        logits, largest = self._with_largest(logits, rows)
        return self._sampler.probabilities(largest, logits, rows)

    def _with_largest(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Largest]:
        rows.check_logits(logits)
        num_rows, vocab = logits.shape
        logits = logits.contiguous()
        largest = self._sampler.room(num_rows)
        _native.largest(logits.data_ptr(), num_rows, vocab, *largest.addresses)
        return logits, largest

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> Tensor:
        bfloat16 = is_bfloat16("x", x.dtype)
        rows, size = check_norm(x, norm, residual, CPU)
        out = torch.empty((rows, size), dtype=x.dtype)
        _native.rms_norm(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            norm.weight.data_ptr(),
            out.data_ptr(),
            bfloat16,
            rows,
            size,
            x.stride(0),
            norm.eps,
            norm.weight_offset,
        )
        return out

    def rotary_kv_write(
        self, qkv: Tensor, at: KVLayer, rotation: Rotation | None, norms: HeadNorms | None
    ) -> None:
        q_heads = check_qkv(qkv, at, CPU)
        head_dim, dtype = at.kv.head_dim, qkv.dtype
        cos_at = sin_at = scale_at = max_positions = half = q_norm_at = k_norm_at = 0
        interleaved = False
        eps = weight_offset = 0.0
        if rotation is not None:
            max_positions, half = check_rotation(rotation, head_dim, CPU)
            cos_at, sin_at = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            interleaved, scale_at = rotation.interleaved, address(rotation.query_scale)
        if norms is not None:
            check_head_norms(norms, head_dim, dtype, CPU)
            q_norm_at, k_norm_at = norms.query.data_ptr(), norms.key.data_ptr()
            eps, weight_offset = norms.eps, norms.weight_offset
        _native.rotary_kv_write(
            own_arrays(at.batch),
            own_pages(at.kv),
            at.layer,
            qkv.data_ptr(),
            qkv.stride(0),
            q_heads,
            cos_at,
            sin_at,
            max_positions,
            half,
            interleaved,
            scale_at,
            q_norm_at,
            k_norm_at,
            eps,
            weight_offset,
        )

    def per_head(self, weight: Tensor, passed: int = 0) -> NativePerHead:
        return NativePerHead(weight, passed)

    def latent_write(
        self, queries: Tensor, latents: Tensor, at: KVLayer, rotation: Rotation, norm: RMSNorm
    ) -> None:
        q_heads = check_latent_write(queries, latents, at, rotation, norm, CPU)
        rotated = at.kv.head_dim - at.kv.latent_rank
        positions, half = check_rotation(rotation, rotated, CPU)
        _native.latent_write(
            own_arrays(at.batch),
            own_pages(at.kv),
            at.layer,
            queries.data_ptr(),
            queries.stride(0),
            q_heads,
            latents.data_ptr(),
            latents.stride(0),
            norm.weight.data_ptr(),
            norm.eps,
            norm.weight_offset,
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            positions,
            half,
            rotation.interleaved,
        )

    def paged_attention(
        self,
        qkv: Tensor,
        at: KVLayer,
        kind: AttentionKind,
        *,
        logit_rows_only: bool = False,
        log_sum_exp: Tensor | None = None,
    ) -> Tensor:
        q_heads = check_qkv(qkv, at, CPU)
        rows = (at.batch.logit_rows if logit_rows_only else qkv).shape[0]
        check_attention(kind, log_sum_exp, rows, q_heads, CPU)
        value_dim = at.kv.latent_rank or at.kv.head_dim
        out = torch.empty((rows, q_heads * value_dim), dtype=qkv.dtype)
        _native.paged_attention(
            own_arrays(at.batch),
            own_pages(at.kv),
            at.layer,
            qkv.data_ptr(),
            qkv.stride(0),
            q_heads,
            out.data_ptr(),
            kind.scale,
            kind.soft_cap,
            kind.window,
            logit_rows_only,
            address(kind.sinks),
            address(log_sum_exp),
        )
        return out

    def merge_attention(
        self, out: Tensor, log_sum_exp: Tensor, part: Tensor, part_log_sum_exp: Tensor
    ) -> None:
        bfloat16 = is_bfloat16("out", out.dtype)
        head_dim = check_merge(out, log_sum_exp, part, part_log_sum_exp, CPU)
        merged, added = (out, log_sum_exp), (part, part_log_sum_exp)
        addresses = [tensor.data_ptr() for tensor in (*merged, *added)]
        _native.merge_attention(*addresses, bfloat16, log_sum_exp.numel(), head_dim)

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> Tensor:
        bfloat16 = is_bfloat16("x", x.dtype)
        rows, size = check_norm(x, norm, residual, CPU)
        out = torch.empty((rows, size), dtype=x.dtype)
        _native.layer_norm(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            norm.weight.data_ptr(),
            0 if norm.bias is None else norm.bias.data_ptr(),
            out.data_ptr(),
            bfloat16,
            rows,
            size,
            x.stride(0),
            norm.eps,
        )
        return out

    def add_rows(self, x: Tensor, table: Tensor, ids: Tensor) -> None:
        bfloat16 = is_bfloat16("x", x.dtype)
        check_tensor("ids", ids, torch.int32, ids.shape, CPU)
        check_tensor("x", x, x.dtype, (len(ids), table.shape[1]), CPU)
        check_tensor("table", table, x.dtype, table.shape, CPU)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
            raise IndexError(f"ids must be from 0 to {len(table) - 1}")
        rows, size = x.shape
        _native.add_rows(x.data_ptr(), table.data_ptr(), ids.data_ptr(), bfloat16, rows, size)

    def scale(self, x: Tensor, factor: float) -> None:
        bfloat16 = is_bfloat16("x", x.dtype)
        check_tensor("x", x, x.dtype, x.shape, CPU)
        _native.scale(x.data_ptr(), factor, bfloat16, x.numel())

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> None:
        bfloat16 = is_bfloat16("x", x.dtype)
        check_tensor("x", x, x.dtype, x.shape, CPU)
        check_tensor("gate", gate, torch.float32, (len(x), 1), CPU)
        _native.sigmoid_scale(x.data_ptr(), gate.data_ptr(), bfloat16, *x.shape)

    def soft_cap(self, logits: Tensor, cap: float) -> None:
        check_tensor("logits", logits, torch.float32, logits.shape, CPU)
        _native.soft_cap(logits.data_ptr(), cap, logits.numel())

    def activated(self, x: Tensor, kind: Activation) -> Tensor:
        bfloat16 = is_bfloat16("x", x.dtype)
        check_rows("x", x, CPU, "[T, I]")
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = *x.shape, x.stride(0)
        _native.activation(x.data_ptr(), out.data_ptr(), ACTIVATIONS.index(kind), bfloat16, *sizes)
        return out

    def record(
        self,
        forward: Callable[[LayerOps[Any]], Any],
        shape: KVShape,
        dtype: torch.dtype,
    ) -> NativeProgram:
        return NativeProgram(forward, shape, dtype, self._sampler)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        bfloat16 = is_bfloat16("gate_up", gate_up.dtype)
        check_gate_up(gate_up, CPU)
        rows, size, stride = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.stride(0)
        out = torch.empty((rows, size), dtype=gate_up.dtype)
        _native.gated(gate_up.data_ptr(), out.data_ptr(), bfloat16, gelu, rows, size, stride)
        return out
