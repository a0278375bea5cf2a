"""Driver of a head that has KV pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.ops import Backend, Batch, HostBatch


class HeadRun:
    """Sequences of one head in shuffled KV pages, whose unused memory is NaN."""

    def __init__(self, head: DecoderHead, backend: Backend, page_size: int) -> None:
        self.head, self.backend, self.page_size = head, backend, page_size
        self.cache = head.new_cache(64, page_size)
        self.cache.storage.fill_(float("nan"))
        self.pages = random.Random(0).sample(range(64), 64)

    def batch(self, rows: Sequence[tuple[int, Sequence[int]]], *, wanted: bool = True) -> Batch:
        """Make a batch of (first position, token ids) for each of some sequences.

        `wanted`: True if the last row of each has logits."""
        counts = np.array([len(ids) for _, ids in rows])
        contexts = np.array([first + len(ids) for first, ids in rows])
        width = 64 // len(rows)
        table = np.array(self.pages, np.int32)[: len(rows) * width].reshape(1, len(rows), width)
        ends = counts.cumsum() - 1 if wanted else []
        host = HostBatch.laid_out(counts, contexts, table, self.page_size, logit_rows=ends)
        ids = np.array([token for _, own in rows for token in own], np.int64)
        host = replace(host, token_ids=ids)
        return self.backend.prepare(host, self.cache, self.backend.allocate_slots(1))

    def draft(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        given: torch.Tensor,
        *,
        fuses: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits and hidden states of the last row of each sequence."""
        return self.head.forward(given, self.batch(rows), self.cache, fuses=fuses)

    def chain(
        self, first: int, ids: Sequence[int], features: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, list[int]]:
        """Draft `count` greedy tokens after rows of one sequence. Returns logits and tokens."""
        given, found, drawn = features, [], []
        for made in range(count):
            logits, given = self.draft([(first, ids)], given, fuses=made == 0)
            drawn.append(int(logits.argmax(-1)))
            found.append(logits)
            first, ids = first + len(ids), drawn[-1:]
        return torch.cat(found), drawn


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
