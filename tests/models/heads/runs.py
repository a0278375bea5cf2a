"""Drives a head that has KV pages."""

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

    def batch(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """Rows of some sequences: positions from the number on, with these token ids. The last one
        of each is wanted."""
        counts = np.array([len(ids) for _, ids in rows])
        contexts = np.array([first + len(ids) for first, ids in rows])
        width = 64 // len(rows)
        table = np.array(self.pages, np.int32)[: len(rows) * width].reshape(1, len(rows), width)
        ends = counts.cumsum() - 1
        host = HostBatch.laid_out(counts, contexts, table, self.page_size, logit_rows=ends)
        ids = np.array([token for _, own in rows for token in own], np.int64)
        host = replace(host, token_ids=ids)
        return self.backend.prepare(host, self.cache, self.backend.allocate_slots(1))

    def guess(
        self, rows: Sequence[tuple[int, Sequence[int]]], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the last row of each sequence."""
        last = self.head.forward(hidden, self.batch(rows), self.cache)
        return last, self.head.logits(last)

    def chain(
        self, first: int, ids: Sequence[int], features: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits of `count` greedy guesses behind rows of one sequence, and their tokens."""
        hidden, found, drawn = self.head.fuse(features), [], []
        for _ in range(count):
            hidden, logits = self.guess([(first, ids)], hidden)
            drawn.append(int(self.head.target_logits(hidden).argmax(-1)))
            found.append(logits)
            first, ids = first + len(ids), drawn[-1:]
        return torch.cat(found), drawn


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
