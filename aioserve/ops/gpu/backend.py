"""Every op on one NVIDIA GPU: Triton's kernels, and torch for the rest. FlashInfer's kernels attend
from prompts if a `prompt_attention` was set.

Kernels are launched on torch's current stream. The caller must have made `device` the current one.
Only `draw` and `prepare` wait for the device. A runner uses `inputs` and `sampling.draw` instead,
which don't wait.

Attention, norms, rotation, draws and linear layers of integers depend on a row alone, to the last
bit. Two libraries may take sums in another order in another batch: cuBLAS, which computes linear
layers of floats, and FlashInfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor
from torch.nn import functional

from aioserve.errors import ConfigError
from aioserve.formats.routing import Routing
from aioserve.formats.weights import CUDA, CUDA_ATTENTION, PackedLinear
from aioserve.ops.backend import AttentionKind, Backend, HeadNorms, KVLayer, RMSNorm, Rotation
from aioserve.ops.batch import STATUS_ERRORS, Drawn, HostBatch, SampleRows
from aioserve.ops.checks import (
    check_attention,
    check_batch,
    check_gate_up,
    check_head_norms,
    check_latent_write,
    check_norm,
    check_qkv,
    check_rotation,
    check_window,
    own,
)
from aioserve.ops.experts import ExpertGate
from aioserve.ops.gpu import latent_attention, rotary, rowwise, sampling
from aioserve.ops.gpu.attention import PromptAttention, paged_attention
from aioserve.ops.gpu.attention_tiles import decode_splits
from aioserve.ops.gpu.experts import GpuMixture
from aioserve.ops.gpu.gpu_batch import GpuBatch, GpuKVLayer
from aioserve.ops.gpu.grouped_linear import GroupedLinear
from aioserve.ops.gpu.inputs import InputLayout, fill_pending, upload_samples
from aioserve.ops.gpu.page_copies import PageCopies
from aioserve.ops.kv_cache import KVCache, KVShape, PlainKVCache
from aioserve.ops.linear import HeldWeight, Linear, plain
from aioserve.ops.reference import TorchLinear

__all__ = ["CudaBackend", "GpuLinear"]


class GpuLinear(TorchLinear):
    """`TorchLinear`, by cuBLAS on a GPU, without waiting on the host."""

    __slots__ = ()

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows by id. An id that is no row is an error that ruins the device: the host would
        have to wait for the ids to check them."""
        self._check_ids(ids)
        return functional.embedding(ids, self._weight)


class CudaBackend(Backend):
    """One CUDA device, or the CPU if Triton interprets its kernels.

    Raises `ConfigError` for other devices.
    """

    name = "cuda"
    formats = CUDA

    def __init__(self, device: torch.device | str = "cuda") -> None:
        chosen = torch.device(device)
        if chosen.type == "cpu":
            if isinstance(rowwise.rms_norm_kernel, triton.JITFunction):
                raise ConfigError(
                    "the backend cuda takes a CPU device only where Triton interprets its kernels: "
                    "set TRITON_INTERPRET=1 before anything imports Triton"
                )
        elif chosen.type != "cuda":
            raise ConfigError(f"the backend cuda needs a CUDA device, got {chosen}")
        elif not torch.cuda.is_available():
            raise ConfigError(
                f"the backend cuda needs a CUDA device: torch finds none for {chosen}"
            )
        elif chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        elif chosen.index >= torch.cuda.device_count():
            raise ConfigError(f"{chosen}: torch finds {torch.cuda.device_count()} CUDA devices")
        self.device: torch.device = chosen
        self.prompt_attention: PromptAttention | None = None
        """Attention from prompts; None for Triton's kernels."""

    def linear(
        self,
        weight: HeldWeight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> GpuLinear | GroupedLinear:
        if isinstance(weight, PackedLinear):
            if bias is not None:
                raise TypeError("bias must be None: it is held with the weight")
            return GroupedLinear(weight, out_dtype=out_dtype, device=self.device)
        return GpuLinear(plain(weight, self.name), bias, out_dtype=out_dtype, device=self.device)

    def mixture(
        self,
        routing: Routing,
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        *,
        gate: ExpertGate = "silu",
        correction: Tensor | None = None,
    ) -> GpuMixture:
        """Raises `UnsupportedModelError` for experts that aren't quantised alike."""
        return GpuMixture(routing, ups, downs, gate=gate, correction=correction)

    def allocate_kv(self, shape: KVShape) -> PlainKVCache:
        sizes = _kv_sizes(shape)
        storage = torch.empty(sizes, dtype=shape.dtype, device=self.device)
        return PlainKVCache(storage, shape)

    def allocate_host_kv(self, shape: KVShape) -> PlainKVCache:
        """Allocate pinned memory if the device is a GPU."""
        sizes, pinned = _kv_sizes(shape), self.device.type == "cuda"
        storage = torch.empty(sizes, dtype=shape.dtype, pin_memory=pinned)
        return PlainKVCache(storage, shape)

    def allocate_pages(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, on_host: bool = False
    ) -> Tensor:
        """Allocate memory for data beside KV pages. Memory of the host is pinned if the device is a
        GPU."""
        if on_host:
            return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        return torch.empty(shape, dtype=dtype, device=self.device)

    def prepare(self, host: HostBatch, kv: KVCache, last_tokens: Tensor) -> GpuBatch:
        check_batch(host, kv)
        layout = InputLayout.of(host, kv.page_size)
        packed = np.zeros(layout.num_bytes, np.uint8)
        shape = layout.pack(host, None, packed)
        splits = decode_splits(shape.num_decodes, kv.num_kv_heads, shape.max_context)
        inputs = layout.views(torch.from_numpy(packed).to(self.device), shape, splits)
        if shape.pending:
            fill_pending(inputs, last_tokens)
        return inputs.batch

    def copy_pages(self, caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
        PageCopies(caches)(copies)

    def draw(self, logits: Tensor, rows: SampleRows, last_tokens: Tensor) -> Drawn:
        rows.check_logits(logits)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        statuses = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        on_device = upload_samples(rows, self.device)
        sampling.draw(logits, on_device, last_tokens, token_ids, statuses)
        errors = {row: STATUS_ERRORS[status] for row, status in enumerate(statuses.tolist())}
        return Drawn(token_ids, {row: why for row, why in errors.items() if why is not None})

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> Tensor:
        check_norm(x, norm, residual, self.device)
        _check_dtype("x", x.dtype)
        return rowwise.rms_norm(x, norm, residual)

    def rotary_kv_write(
        self, qkv: Tensor, at: KVLayer, rotation: Rotation | None, norms: HeadNorms | None
    ) -> None:
        q_heads, on_gpu = check_qkv(qkv, at, self.device), _own(at)
        head_dim, end_position = at.kv.head_dim, at.batch.end_position
        if norms is not None:
            check_head_norms(norms, head_dim, qkv.dtype, self.device)
        if rotation is not None:
            rows, _ = check_rotation(rotation, head_dim, self.device)
            if end_position > rows:
                raise ValueError(
                    f"batch: positions go to {end_position - 1}, but cos has {rows} rows"
                )
        rotary.rotary_kv_write(qkv, on_gpu, q_heads, rotation, norms)

    def latent_write(
        self, queries: Tensor, latents: Tensor, at: KVLayer, rotation: Rotation, norm: RMSNorm
    ) -> None:
        check_latent_write(queries, latents, at, rotation, norm, self.device)
        rows, _ = check_rotation(rotation, at.kv.head_dim - at.kv.latent_rank, self.device)
        if at.batch.end_position > rows:
            raise ValueError(
                f"batch: positions go to {at.batch.end_position - 1}, but cos has {rows} rows"
            )
        latent_attention.latent_write(queries, latents, _own(at), rotation, norm)

    def paged_attention(
        self,
        qkv: Tensor,
        at: KVLayer,
        kind: AttentionKind,
        *,
        logit_rows_only: bool = False,
        log_sum_exp: Tensor | None = None,
    ) -> Tensor:
        q_heads, rows = check_qkv(qkv, at, self.device), at.batch.logit_rows
        tokens = qkv.shape[0]
        check_attention(
            kind, log_sum_exp, len(rows) if logit_rows_only else tokens, q_heads, self.device
        )
        check_window(at.kv, at.layer, kind.window)
        of_all = log_sum_exp
        if log_sum_exp is not None and logit_rows_only:
            of_all = torch.empty((tokens, q_heads), dtype=torch.float32, device=self.device)
        prompts = self.prompt_attention
        out = paged_attention(qkv, _own(at), kind, prompts=prompts, log_sum_exp=of_all)
        if not logit_rows_only:
            return out
        if log_sum_exp is not None and of_all is not None:
            log_sum_exp.copy_(of_all[rows])
        return out[rows]

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        check_gate_up(gate_up, self.device)
        _check_dtype("gate_up", gate_up.dtype)
        return rowwise.gated(gate_up, gelu)


def _own(at: KVLayer) -> GpuKVLayer:
    batch = own("batch", at.batch, GpuBatch, "prepared")
    return GpuKVLayer(batch, own("kv", at.kv, PlainKVCache, "allocated"), at.layer)


def _kv_sizes(shape: KVShape) -> tuple[int, ...]:
    _check_dtype("dtype", shape.dtype)
    sizes = shape.plain()
    rank, limits = shape.latent_rank, CUDA_ATTENTION
    if rank > limits.latent_rank:
        raise ValueError(f"latent_rank must be at most {limits.latent_rank}, got {rank}")
    if shape.head_dim - rank > limits.head_dim:
        beyond = f" beyond latent_rank {rank}" if rank else ""
        raise ValueError(
            f"head_dim must be at most {limits.head_dim}{beyond}, got {shape.head_dim}"
        )
    return sizes


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in GpuLinear.dtypes:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
