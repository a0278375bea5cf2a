"""Pairs of rows and experts sorted by expert, on the device: the blocks that kernels multiply.

A block has pairs of one expert. Only the device knows how many blocks an expert has. A launch
therefore has the largest possible number, and blocks that aren't needed end at once. No step waits
for the host, and all of it can be in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ROWS", "Blocks", "Pairs", "sorted_pairs"]

ROWS = 16
"""Rows of a block. The number is fixed, so that one instruction multiplies them in any batch."""


class Blocks(NamedTuple):
    """int32 [blocks] each."""

    experts: Tensor
    """Expert of the block; for an unused block, the number of experts."""
    starts: Tensor
    """First pair of the block."""
    ends: Tensor
    """End of that expert's pairs."""


class Pairs(NamedTuple):
    """Rows that each have an expert, sorted by expert. Rows without an expert are last."""

    rows: Tensor
    """int32 [pairs]: rows of the multiplied matrix."""
    experts: Tensor
    """int64 [pairs]; the number of experts for pairs without one."""
    blocks: Blocks


def sorted_pairs(ids: Tensor, experts: int) -> tuple[Pairs, Tensor]:
    """Sort ids [rows, top_k], -1 for none. Returns the pairs, whose rows are those of the ids, and
    each id's place or -1, int32 [rows, top_k]."""
    flat = ids.flatten().long()
    keys = torch.where(flat < 0, experts, flat)
    order = keys.argsort(stable=True)
    each = torch.arange(len(flat), dtype=torch.int32, device=ids.device)
    places = torch.empty_like(each).scatter_(0, order, each)
    places.masked_fill_(flat < 0, -1)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:experts]
    ends, blocks = counts.cumsum(0), (counts + ROWS - 1) // ROWS
    last = blocks.cumsum(0)
    number = torch.arange(
        len(flat) // ROWS + min(experts, len(flat)), dtype=torch.int64, device=ids.device
    )
    expert = torch.searchsorted(last, number, right=True)
    known = expert.clamp(max=experts - 1)
    within = number - (last - blocks)[known]
    starts = (ends - counts)[known] + within * ROWS
    found = Blocks(expert.int(), starts.int(), ends[known].int())
    rows = (order // ids.shape[1]).int()
    return Pairs(rows, keys[order], found), places.view(ids.shape)
