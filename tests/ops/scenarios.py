"""Batches over KV pages for the tests of ops: what a scheduler would lay out, but poisoned.

Every slot that no position of a sequence maps to holds NaN, and table entries past the context name
such pages, so a kernel that reads what it must not shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioserve.ops import AttentionBatch, KVCache

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(slots=True, frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


@dataclass(slots=True, frozen=True)
class Scenario:
    cache: KVCache
    batch: AttentionBatch
    q: Tensor

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.cache.layer(0)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def history(context: int, heads: int, dim: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Random `[context, heads, dim]` whose rows don't depend on `context`."""
    # torch draws the last block of 16 anew where the size is no multiple of 16.
    return random(-(-context // 16) * 16, heads, dim, dtype=dtype, seed=seed)[:context]


def lay_out(
    sequences: Sequence[tuple[int, int, int]],
    heads: Heads,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scenario:
    """One step of `sequences`, each (name, query tokens, context).

    What a sequence holds at a position (query, key and value) depends on its name and the position
    alone, so the same rows can be laid out in other batches, chunks and page sizes.
    """
    counts = [-(-context // page_size) for _, _, context in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    spare = order[-1]
    table = torch.full((len(sequences), max(counts, default=0) + 1), int(spare), dtype=torch.int32)
    cache = KVCache.allocate(1, num_pages, page_size, heads.kv, heads.dim, dtype)
    cache.storage.fill_(float("nan"))
    starts, slots, positions, queries = [0], [], [], []
    used = 0
    for row, (name, tokens, context) in enumerate(sequences):
        table[row, : counts[row]] = order[used : used + counts[row]]
        used += counts[row]
        at = torch.arange(context)
        pages, offsets = table[row, at // page_size].long(), at % page_size
        for which in (0, 1):
            values = history(context, heads.kv, heads.dim, dtype, seed=3 * name + which)
            cache.storage[0, which][pages, :, offsets] = values
        rows = slice(context - tokens, context)
        queries.append(history(context, heads.q, heads.dim, dtype, seed=3 * name + 2)[rows])
        slots.append((pages * page_size + offsets)[rows])
        positions.append(at[rows].int())
        starts.append(starts[-1] + tokens)
    batch = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, _, context in sequences], dtype=torch.int32),
        page_table=table,
        token_locations=torch.cat(slots),
        positions=torch.cat(positions),
        max_query=max(tokens for _, tokens, _ in sequences),
        max_context=max(context for _, _, context in sequences),
    )
    return Scenario(cache, batch, torch.cat(queries))


def widened(scenario: Scenario) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, key pages and value pages in float64, for an exact reference."""
    k_pages, v_pages = scenario.pages
    return scenario.q.double(), k_pages.double(), v_pages.double()
