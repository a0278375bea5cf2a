"""Every op in plain torch: the definition that faster backends are tested against.

Runs on any device of torch's and in any floating dtype. Arithmetic is in float32 (float64 stays
float64); results are rounded once, to the dtype of the first argument. Written to be read, not to
be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aioserve.ops.backend import AttentionKind, Backend, HeadNorms, KVLayer, RMSNorm, Rotation
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows, row_error
from aioserve.ops.checks import (
    check_attention,
    check_batch,
    check_copies,
    check_gate_up,
    check_head_norms,
    check_latent_write,
    check_norm,
    check_qkv,
    check_rotation,
    check_window,
    own,
)
from aioserve.ops.kept_tokens import kept_tokens, scaled
from aioserve.ops.kv_cache import KVCache, KVShape, PlainKVCache, copy_plain_pages
from aioserve.ops.linear import HeldWeight, Linear, plain
from aioserve.ops.philox import exponentials
from aioserve.paging.layout import first_seen
from aioserve.paging.pages import capacity_tokens, full_pages, pages_for, tokens_in_part

__all__ = ["ReferenceBackend"]


@dataclass(slots=True, frozen=True)
class ReferenceBatch(Batch):
    """`HostBatch` on the device. Loops run over values on the host."""

    query_start: tuple[int, ...]
    context_lens: tuple[int, ...]
    page_tables: tuple[Tensor, ...]
    """int64 [B, P] of each group of layers."""
    token_pages: Tensor
    """[G, T]"""
    token_offsets: Tensor
    """[G, T]"""
    num_pages: int
    page_size: int
    windows: tuple[int, ...]
    """Window of each group; 0 for none."""


class TorchLinear(Linear):
    """`torch.nn.functional.linear` over the plain weight.

    The order of its sums may depend on the number of rows, so rows can differ in their last bits.
    From bfloat16 weights, float32 results are sums rounded to bfloat16.
    """

    __slots__ = ("_bias", "_weight")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(weight, bias, out_dtype=out_dtype)
        self._weight = weight.detach().to(device, copy=True).contiguous()
        self._bias = None if bias is None else bias.detach().to(device, copy=True).contiguous()
        self.num_bytes: int = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if (
            x.dtype is not self.dtype
            or x.dim() != 2
            or x.shape[1] != self.in_features
            or x.device != self._weight.device
            or (x.stride(1) != 1 and self.in_features != 1)
        ):
            self._refuse(x)
        return functional.linear(x, self._weight, self._bias).to(self.out_dtype)

    @staticmethod
    def stacked(layers: Sequence[TorchLinear]) -> tuple[Tensor, Tensor | None]:
        """Stack the weights of layers of one shape into one tensor [layers, N, K], and their
        biases, if any, into [layers, N]. The layers keep views of it, so nothing is stored
        twice."""
        weight = torch.stack([layer._weight for layer in layers])
        biases = [layer._bias for layer in layers if layer._bias is not None]
        if biases and len(biases) < len(layers):
            raise ValueError(f"all layers must have a bias, or none, got {len(biases)}")
        bias = torch.stack(biases) if biases else None
        for i, layer in enumerate(layers):
            layer._weight = weight[i]
            layer._bias = None if bias is None else bias[i]
        return weight, bias

    def rows(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids must be from 0 to {self.out_features - 1}")
        return functional.embedding(ids, self._weight)


class ReferenceBackend(Backend):
    """torch, on one of its devices."""

    name = "reference"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device: torch.device = torch.device(device)

    def linear(
        self,
        weight: HeldWeight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> TorchLinear:
        return TorchLinear(plain(weight, self.name), bias, out_dtype=out_dtype, device=self.device)

    def allocate_kv(self, shape: KVShape) -> PlainKVCache:
        storage = torch.empty(shape.plain(), dtype=shape.dtype, device=self.device)
        return PlainKVCache(storage, shape)

    def prepare(self, host: HostBatch, kv: KVCache, last_tokens: Tensor) -> ReferenceBatch:
        check_batch(host, kv)
        token_ids = self._upload(host.token_ids).clone()
        pending = self._upload(host.pending_rows)
        token_ids[pending] = last_tokens[self._upload(host.pending_slots)]
        return ReferenceBatch(
            token_ids=token_ids,
            positions=self._upload(host.positions),
            logit_rows=self._upload(host.logit_rows),
            end_position=host.end_position,
            query_start=tuple(host.query_start.tolist()),
            context_lens=tuple(host.context_lens.tolist()),
            page_tables=self._upload(host.page_table).long().unbind(),
            token_pages=self._upload(full_pages(host.token_locations, kv.page_size)),
            token_offsets=self._upload(tokens_in_part(host.token_locations, kv.page_size)),
            num_pages=kv.num_pages,
            page_size=kv.page_size,
            windows=kv.layout.windows,
        )

    def _upload(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def copy_pages(self, caches: Sequence[KVCache], copies: npt.NDArray[np.int32]) -> None:
        check_copies(caches, copies)
        copy_plain_pages([_own_pages(cache) for cache in caches], copies)

    def draw(self, logits: Tensor, rows: SampleRows, last_tokens: Tensor) -> Drawn:
        rows.check_logits(logits)
        token_ids = [0] * len(rows)
        errors = {}
        for i in range(len(rows)):
            row = logits[i].double()
            if (error := row_error(float(row.max()))) is not None:
                errors[i] = error
            elif rows["temperature"][i] == 0:
                token_ids[i] = int(row.argmax())
            else:
                row = scaled(row, float(rows["temperature"][i]))
                kept = kept_tokens(row, rows, i)
                token_ids[i] = _race(row, kept, int(rows.seeds[i]), int(rows.positions[i]))
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        last_tokens[self._upload(rows.slots)] = tokens
        return Drawn(tokens, errors)

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> Tensor:
        check_norm(x, norm, residual, self.device)
        if residual is not None:
            x = residual.copy_(_wide(residual) + _wide(x))
        return _rms_norm(x, norm)

    def rotary_kv_write(
        self, qkv: Tensor, at: KVLayer, rotation: Rotation | None, norms: HeadNorms | None
    ) -> None:
        q_heads, kv, kv_heads = check_qkv(qkv, at, self.device), at.kv, at.kv.num_kv_heads
        batch = _own_batch(at)
        (k_pages, v_pages), (group, _) = _own_pages(kv).layer(at.layer), kv.places[at.layer]
        q, k, v = qkv.unflatten(1, (-1, kv.head_dim)).split([q_heads, kv_heads, kv_heads], dim=1)
        new_q, new_k = _wide(q), _wide(k)
        if norms is not None:
            check_head_norms(norms, kv.head_dim, qkv.dtype, self.device)
            new_q = _rms_norm(new_q, RMSNorm(norms.query, norms.eps, norms.weight_offset))
            new_k = _rms_norm(new_k, RMSNorm(norms.key, norms.eps, norms.weight_offset))
        if rotation is not None:
            angles = self._angles(rotation, kv.head_dim, batch)
            new_q, new_k = _rotate(new_q, *angles), _rotate(new_k, *angles)
            if rotation.query_scale is not None:
                new_q = new_q * rotation.query_scale[batch.positions.long(), None, None]
        q.copy_(new_q)
        pages, offsets = batch.token_pages[group], batch.token_offsets[group]
        keys, values = _numbers_alone(new_k.to(k_pages.dtype), v.to(v_pages.dtype))
        k_pages[pages, :, offsets], v_pages[pages, :, offsets] = keys, values

    def _angles(
        self, rotation: Rotation, head_dim: int, batch: ReferenceBatch
    ) -> tuple[Tensor, Tensor, bool]:
        rows, _ = check_rotation(rotation, head_dim, self.device)
        if batch.end_position > rows:
            raise ValueError(
                f"batch: positions go to {batch.end_position - 1}, but cos has {rows} rows"
            )
        at = batch.positions.long()
        return rotation.cos[at], rotation.sin[at], rotation.interleaved

    def latent_write(
        self, queries: Tensor, latents: Tensor, at: KVLayer, rotation: Rotation, norm: RMSNorm
    ) -> None:
        check_latent_write(queries, latents, at, rotation, norm, self.device)
        kv, batch, rank = at.kv, _own_batch(at), at.kv.latent_rank
        pages, _ = _own_pages(kv).layer(at.layer)
        angles = self._angles(rotation, kv.head_dim - rank, batch)
        turned = queries.unflatten(1, (-1, kv.head_dim))[..., rank:]
        turned.copy_(_rotate(_wide(turned), *angles))
        key = _rotate(_wide(latents[:, None, rank:]), *angles)
        value = _rms_norm(latents[:, None, :rank], norm)
        key, value = _numbers_alone(key.to(pages.dtype), value)
        row = torch.cat([value, key], dim=-1)
        group, _ = kv.places[at.layer]
        pages[batch.token_pages[group], :, batch.token_offsets[group]] = row

    def paged_attention(
        self,
        qkv: Tensor,
        at: KVLayer,
        kind: AttentionKind,
        *,
        logit_rows_only: bool = False,
        log_sum_exp: Tensor | None = None,
    ) -> Tensor:
        q_heads, kv, batch = check_qkv(qkv, at, self.device), at.kv, _own_batch(at)
        rows = (batch.logit_rows if logit_rows_only else qkv).shape[0]
        check_attention(kind, log_sum_exp, rows, q_heads, self.device)
        check_window(kv, at.layer, kind.window)
        k_pages, v_pages = _own_pages(kv).layer(at.layer)
        page_table = batch.page_tables[kv.places[at.layer][0]]
        q = qkv.unflatten(1, (-1, kv.head_dim))[:, :q_heads]
        group = q.shape[1] // kv.num_kv_heads
        v_pages = v_pages[..., : kv.latent_rank or kv.head_dim]
        out = torch.empty((*q.shape[:2], v_pages.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for row, context in enumerate(batch.context_lens):
            start, stop = batch.query_start[row], batch.query_start[row + 1]
            if start == stop:
                continue
            position = context - (stop - start)  # of the first query
            first = first_seen(position, kind.window)
            first_page = full_pages(first, kv.page_size)
            pages = page_table[row, first_page : pages_for(context, kv.page_size)]
            begin = capacity_tokens(first_page, kv.page_size)
            keys, values = (
                _wide(
                    cached[pages].transpose(0, 1).flatten(1, 2)[:, first - begin : context - begin]
                )
                for cached in (k_pages, v_pages)
            )
            queries = _wide(q[start:stop]).transpose(0, 1)
            scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * kind.scale
            if kind.soft_cap > 0:
                scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
            key_at = torch.arange(first, context, device=q.device)
            query_at = torch.arange(position, context, device=q.device)[:, None]
            hidden = key_at > query_at
            if kind.window > 0:
                hidden |= key_at <= query_at - kind.window
            scores = scores.masked_fill(hidden, float("-inf"))
            if kind.sinks is not None:
                sinks = kind.sinks.to(scores.dtype)[:, None, None]
                scores = torch.cat([scores, sinks.expand(-1, stop - start, 1)], dim=-1)
            weights = scores.softmax(-1)[..., : context - first]
            attended = weights @ values.repeat_interleave(group, 0)
            out[start:stop] = attended.transpose(0, 1).to(q.dtype)
            if log_sum_exp is not None:
                sums[start:stop] = scores.logsumexp(-1).T
        if log_sum_exp is not None:
            log_sum_exp.copy_(sums[batch.logit_rows] if logit_rows_only else sums)
        return (out[batch.logit_rows] if logit_rows_only else out).flatten(1)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        check_gate_up(gate_up, self.device)
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return (active * up).to(gate_up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide * scale * (_wide(norm.weight) + norm.weight_offset)).to(x.dtype)


def _numbers_alone(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[T, H, ...]` without NaN or infinity among the values.

    Attention multiplies unseen values by 0, and NaN times 0 is NaN. So a bad value becomes zeros,
    and its key becomes NaN: only the rows that see it get NaN.
    """
    finite = values.isfinite().all(-1, keepdim=True)
    return keys.masked_fill(~finite, float("nan")), values.masked_fill(~finite, 0)


def _own_pages(kv: KVCache) -> PlainKVCache:
    return own("kv", kv, PlainKVCache, "allocated")


def _own_batch(at: KVLayer) -> ReferenceBatch:
    batch, kv = own("batch", at.batch, ReferenceBatch, "prepared"), at.kv
    if (batch.num_pages, batch.page_size) != (kv.num_pages, kv.page_size):
        raise ValueError(
            f"batch: was prepared for {batch.num_pages} pages of {batch.page_size} tokens, got "
            f"{kv.num_pages} of {kv.page_size}"
        )
    if batch.windows != kv.layout.windows:
        raise ValueError("batch: was prepared for pages of other groups")
    return batch


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R of D dimensions, pairing `i` with `i + R / 2`, or `2 i` with `2 i + 1` if
    they are interleaved. x is `[T, H, D]`, wide."""
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _race(scores: Tensor, kept: Tensor | None, seed: int, position: int) -> int:
    """Id with the least exponential divided by its probability, among `kept` or all, for one row of
    scaled logits."""
    ids = torch.arange(len(scores)) if kept is None else kept.sort().values.cpu()
    noise = exponentials(seed, position, ids.numpy())
    return int(ids[int(np.argmin(np.log(noise) - scores.cpu()[ids].numpy()))])
