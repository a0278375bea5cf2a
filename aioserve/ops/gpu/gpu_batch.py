"""A step as the GPU's kernels read it.

Knows shapes. Sizes of launches are integers of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioserve.ops.batch import Batch
from aioserve.ops.kv_cache import PlainKVCache

__all__ = ["QUERY_BLOCK", "GpuBatch", "GpuKVLayer", "HostPrompts"]

QUERY_BLOCK = 128
"""Tokens of a sequence in one of `GpuBatch.query_blocks`.

A block's rows are its tokens times the query heads that share a KV head. Tiles of rows divide a
block for any number of heads, so blocks are the same for all models.
"""


@dataclass(slots=True, frozen=True, eq=False)
class HostPrompts:
    """The N sequences after a step's decodes, on the host, for attention that is planned there.

    query_counts  [N]        query tokens of each
    context_lens  [N]        entries in its KV pages after this step's writes
    page_table    [G, N, P]  of each group of layers, dense rows; arbitrary behind a context's
                             pages, and before the window of a group
    """

    query_counts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class GpuBatch(Batch):
    """B sequences, of which the first `num_decodes` have one query token each.

        query_start      int32 [B + 1]  prefix sums of the query tokens per sequence
        context_lens     int32 [B]      entries in the KV pages after this step's writes
        page_tables      int32 [B, P]   of each group of layers, dense rows; they may lie apart, and
                                        be longer than needed
        token_locations  int64 [T]      of each group: page * page_size + offset, where a token's K
                                        and V go
        query_blocks     int32 [N, 2]   of the sequences behind the decodes: (sequence, first query
                                        token within it) of each block of QUERY_BLOCK tokens

    A padded decode is a sequence of its own. Its row of the page table names a page without an
    owner. With a context of 0 it attends to nothing and its row is 0.

    `num_splits` programs share the context of a decode. Their number affects speed only: rows are
    the same to the last bit.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    page_tables: tuple[torch.Tensor, ...]
    token_locations: tuple[torch.Tensor, ...]
    num_sequences: int
    num_decodes: int
    query_blocks: torch.Tensor
    num_splits: int
    prompts: HostPrompts


class GpuKVLayer(NamedTuple):
    """`KVLayer` on the GPU."""

    batch: GpuBatch
    kv: PlainKVCache
    layer: int

    @property
    def group(self) -> int:
        """Group of the layer."""
        return self.kv.places[self.layer][0]
