"""Batches over KV pages for the tests of ops, laid out as by a scheduler, but poisoned.

Locations that belong to no position of a sequence are NaN, and table entries past the context name
pages of NaN. A kernel that reads too far therefore shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from aioserve.ops import Backend, Batch, HostBatch, KVCache, KVShape
from aioserve.ops.backend import KVLayer
from aioserve.ops.kv_cache import PlainKVCache, format_of_floats
from aioserve.ops.native import NativeBackend
from aioserve.ops.reference import ReferenceBackend
from aioserve.paging.format import KVEntry
from aioserve.paging.layout import KVLayout, LayerKV, kv_layout
from tests.ops.contents import fill

DTYPES = [torch.float32, torch.bfloat16]
NATIVE, REFERENCE = NativeBackend(), ReferenceBackend()
BACKENDS = [NATIVE, REFERENCE]


@dataclass(slots=True, frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


@dataclass(slots=True, frozen=True)
class Step:
    """Scenario on one backend."""

    qkv: Tensor
    batch: Batch
    kv: KVCache
    q_size: int

    @property
    def q(self) -> Tensor:
        return self.qkv[:, : self.q_size]

    @property
    def at(self) -> KVLayer:
        return KVLayer(self.batch, self.kv, 0)


@dataclass(slots=True, frozen=True)
class Scenario:
    storage: Tensor
    """Contents of the KV pages, shaped as by `contents`."""
    host: HostBatch
    q: Tensor
    """Queries [T, Hq, D]."""

    @property
    def page_size(self) -> int:
        return self.storage.shape[4]

    @property
    def num_pages(self) -> int:
        return self.storage.shape[2]

    def alone(self, row: int) -> Scenario:
        """Return a sequence in a batch of its own, on the same pages."""
        host = self.host
        own = slice(host.query_start[row], host.query_start[row + 1])
        tokens = own.stop - own.start
        return replace(
            self,
            q=self.q[own],
            host=replace(
                host,
                token_ids=host.token_ids[own],
                query_start=np.array([0, tokens], np.int32),
                context_lens=host.context_lens[row : row + 1],
                page_table=host.page_table[:, row : row + 1],
                token_locations=host.token_locations[:, own],
                positions=host.positions[own],
                logit_rows=np.arange(tokens),
            ),
        )

    def share(self, row: int, of: int, first: int, last: int) -> None:
        """Let sequence `row` read the pages [first, last) of sequence `of`."""
        self.host.page_table[:, row, first:last] = self.host.page_table[:, of, first:last]

    def on(self, backend: Backend, *, wide: bool = False, qkv: Tensor | None = None) -> Step:
        """Copy the scenario to a backend; with `wide`, in float64, for an exact reference.

        Without `qkv`, keys and values in the fused rows are NaN, since they are in the pages.
        """
        dtype = torch.float64 if wide else self.storage.dtype
        tokens, _, dim = self.q.shape
        if qkv is None:
            others = torch.full((tokens, 2 * self.storage.shape[3], dim), float("nan"))
            qkv = torch.cat([self.q, others.to(self.q.dtype)], dim=1)
        kv = allocate(backend, 1, self.num_pages, self.page_size, self.storage.shape[3], dim, dtype)
        kv.storage.fill_(float("nan"))
        fill(kv, self.storage)
        batch = backend.prepare(self.host, kv, backend.allocate_slots(1))
        fused = qkv.to(dtype, copy=True).flatten(1)
        return Step(fused, batch, kv, self.q.shape[1] * dim)


def allocate(
    backend: Backend,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> KVCache:
    layout = one_group(num_layers, num_kv_heads, head_dim, dtype)
    return backend.allocate_kv(KVShape(layout, num_pages, page_size))


def one_group(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, latent: bool = False
) -> KVLayout:
    """Return the layout of layers with full attention."""
    entry = KVEntry(format_of_floats(dtype), num_kv_heads, head_dim, latent)
    return kv_layout([LayerKV(entry)] * num_layers, 1)


def plain_cache(values: Tensor, device: torch.device | str = "cpu") -> PlainKVCache:
    """Allocate pages that hold `values`, shaped as by `contents`."""
    layers, _, pages, heads, size, dim = values.shape
    shape = KVShape(one_group(layers, heads, dim, values.dtype), pages, size)
    cache = PlainKVCache(torch.empty(shape.plain(), dtype=values.dtype, device=device), shape)
    fill(cache, values.to(device))
    return cache


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@lru_cache(maxsize=64)
def history(context: int, heads: int, dim: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Draw `[context, heads, dim]` with rows that don't depend on `context`. Read-only."""
    # torch draws the last block of 16 again if the size isn't a multiple of 16.
    return random(-(-context // 16) * 16, heads, dim, dtype=dtype, seed=seed)[:context]


def lay_out(
    sequences: Sequence[tuple[int, int, int]],
    heads: Heads,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scenario:
    """Lay out a step of `sequences`, each (name, query tokens, context).

    Query, key and value at a position depend only on the sequence's name and the position. The same
    rows can therefore be laid out in other batches, chunks and page sizes.
    """
    counts = [-(-context // page_size) for _, _, context in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    spare = order[-1]
    table = torch.full((len(sequences), max(counts, default=0) + 1), int(spare), dtype=torch.int32)
    storage = torch.full((1, 2, num_pages, heads.kv, page_size, heads.dim), float("nan")).to(dtype)
    starts, slots, positions, queries = [0], [], [], []
    used = 0
    for row, (name, tokens, context) in enumerate(sequences):
        table[row, : counts[row]] = order[used : used + counts[row]]
        used += counts[row]
        at = torch.arange(context)
        pages, offsets = table[row, at // page_size].long(), at % page_size
        for which in (0, 1):
            values = history(context, heads.kv, heads.dim, dtype, seed=3 * name + which)
            storage[0, which][pages, :, offsets] = values
        rows = slice(context - tokens, context)
        queries.append(history(context, heads.q, heads.dim, dtype, seed=3 * name + 2)[rows])
        slots.append((pages * page_size + offsets)[rows])
        positions.append(at[rows].int())
        starts.append(starts[-1] + tokens)
    host = HostBatch(
        token_ids=np.zeros(starts[-1], np.int64),
        query_start=np.array(starts, np.int32),
        context_lens=np.array([context for _, _, context in sequences], np.int32),
        page_table=table[None].numpy(),
        token_locations=torch.cat(slots)[None].numpy(),
        positions=torch.cat(positions).numpy(),
        logit_rows=np.arange(starts[-1]),
        pending_rows=np.zeros(0, np.int64),
        pending_slots=np.zeros(0, np.int64),
    )
    return Scenario(storage, host, torch.cat(queries))
