"""Drives a bare `Decoder` over shuffled KV pages, several sequences and chunks at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from aioserve.models.batch import ForwardBatch
from aioserve.models.decoder import Decoder
from aioserve.ops.types import AttentionBatch


class PagedRun:
    """Sequences that live in one KV cache. Unused page memory is NaN, so reading it shows."""

    def __init__(self, decoder: Decoder, *, num_pages: int = 64, page_size: int = 4) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self.cache = decoder.new_cache(num_pages, page_size)
        self.cache.storage.fill_(float("nan"))
        self._free = list(range(num_pages))
        random.Random(0).shuffle(self._free)
        self._pages: dict[str, list[int]] = {}
        self._known: dict[str, list[int]] = {}

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute these further tokens of these sequences in one forward pass.

        Returns the logits of every token: float32 [count, vocab] by sequence.
        """
        starts, contexts, slots, positions, token_ids = [0], [], [], [], []
        for name, ids in chunks.items():
            known = self._known.setdefault(name, [])
            first = len(known)
            known.extend(ids)
            pages = self._pages.setdefault(name, [])
            while len(pages) * self.page_size < len(known):
                pages.append(self._free.pop())
            for position in range(first, len(known)):
                page, offset = divmod(position, self.page_size)
                slots.append(pages[page] * self.page_size + offset)
                positions.append(position)
            token_ids.extend(ids)
            starts.append(len(token_ids))
            contexts.append(len(known))
        width = max(len(self._pages[name]) for name in chunks)
        table = [self._pages[n] + [0] * (width - len(self._pages[n])) for n in chunks]
        attention = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            token_locations=torch.tensor(slots),
            positions=torch.tensor(positions, dtype=torch.int32),
            max_query=max(len(ids) for ids in chunks.values()),
            max_context=max(contexts),
        )
        batch = ForwardBatch(torch.tensor(token_ids), attention, torch.arange(len(token_ids)))
        logits = self.decoder.forward(batch, self.cache)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}
