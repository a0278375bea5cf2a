"""A step plan as flat arrays, the form in which a model computes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aioserve.execution.plan import CopyKind, PageCopy, StepPlan
from aioserve.kv.pages import pages_for, token_locations
from aioserve.models.batch import ForwardBatch
from aioserve.ops.types import AttentionBatch

__all__ = ["build_batch", "build_copies"]

# Indices of the source's and the target's cache: 0 is the device's, 1 the host's.
_CACHES = {CopyKind.DEVICE: (0, 0), CopyKind.TO_HOST: (0, 1), CopyKind.FROM_HOST: (1, 0)}


def build_copies(copies: Sequence[PageCopy]) -> torch.Tensor:
    """The rows that the op `copy_pages` takes, int32 `[N, 5]`, in the order of `copies`.

    Cache 0 is the device's, 1 the host's.
    """
    rows: list[int] = []
    for copy in copies:
        source_cache, target_cache = _CACHES[copy.kind]
        rows += (source_cache, copy.source, target_cache, copy.target, copy.num_tokens)
    return torch.from_numpy(np.array(rows, np.int32).reshape(-1, 5))


def build_batch(plan: StepPlan, page_size: int, last_tokens: torch.Tensor) -> ForwardBatch:
    """Concatenate the plan's items, T tokens of B sequences, in the plan's order.

    `last_tokens`, int64 `[num_slots]`, holds the token that each slot sampled last: the input of
    items whose token the host doesn't know yet.
    """
    items = plan.items
    counts = np.fromiter((item.count for item in items), np.int64, len(items))
    size = len(items)
    starts = np.fromiter((item.start for item in items), np.int64, size)
    context_lens = starts + counts
    query_start = np.zeros(size + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    max_context = int(context_lens.max())

    page_table = np.zeros((size, pages_for(max_context, page_size)), np.int32)
    for row, item in enumerate(items):
        pages = pages_for(item.start + item.count, page_size)
        page_table[row, :pages] = item.page_ids[:pages]
    token_ids = np.empty(total, np.int64)
    if total == size:
        token_ids[:] = [item.token_ids[0] for item in items]
    else:
        for row, item in enumerate(items):
            token_ids[query_start[row] : query_start[row + 1]] = item.token_ids

    rows = np.repeat(np.arange(size), counts)
    positions = np.arange(total) - query_start[rows] + starts[rows]

    sample_rows = np.array(
        [
            first + row.offset
            for first, item in zip(query_start.tolist(), items, strict=False)
            for row in item.rows
        ],
        np.int64,
    )

    ids = torch.from_numpy(token_ids)
    pending = np.flatnonzero(token_ids < 0)
    if len(pending):
        slots = np.fromiter((items[row].slot for row in rows[pending]), np.int64, len(pending))
        ids[torch.from_numpy(pending)] = last_tokens[torch.from_numpy(slots)]
    return ForwardBatch(
        token_ids=ids,
        attention=AttentionBatch(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            page_table=torch.from_numpy(page_table),
            token_locations=torch.from_numpy(
                token_locations(page_table, rows, positions, page_size)
            ),
            positions=torch.from_numpy(positions.astype(np.int32)),
            max_query=int(counts.max()),
            max_context=max_context,
        ),
        sample_rows=torch.from_numpy(sample_rows),
    )
