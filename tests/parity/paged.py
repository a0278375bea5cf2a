"""Driver of a bare `Decoder` over shuffled KV pages, several sequences and chunks at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from aioserve.models.decoder import Decoder
from aioserve.ops import HostBatch
from aioserve.paging.layout import first_seen, kv_layout

LEFT = 2**30
"""Page id in table entries behind the window. No such page exists, so that reading it fails."""


class PagedRun:
    """Sequences in one KV cache. Unused page memory is NaN, so that reading it shows.

    With `grouped`, layers with a window keep only the window. A page that leaves it becomes NaN
    after the step, and is the next to be used.
    """

    def __init__(
        self, decoder: Decoder, *, num_pages: int = 64, page_size: int = 4, grouped: bool = False
    ) -> None:
        self.decoder = decoder
        self.page_size = page_size
        layers = decoder.config.kv_layers(decoder.kv_format)
        decoder.layout = kv_layout(layers, decoder.max_model_len, grouped=grouped)
        self.groups = decoder.layout.groups
        self.cache = decoder.new_cache(num_pages, page_size)
        self.cache.storage.fill_(float("nan"))
        self._free = list(range(num_pages))
        random.Random(0).shuffle(self._free)
        self._pages: dict[str, list[list[int]]] = {}
        """Pages of each sequence, by group."""
        self._known: dict[str, list[int]] = {}

    @property
    def num_held(self) -> int:
        """Number of pages that sequences hold."""
        return self.cache.num_pages - len(self._free)

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute these further tokens of these sequences in one forward pass.

        Returns the logits of every token: float32 [count, vocab] by sequence.
        """
        logits, starts = self._forward(chunks, None)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}

    def rows(self, chunks: Mapping[str, Sequence[int]], logit_rows: Sequence[int]) -> torch.Tensor:
        """`step`, but return only some rows of the batch's logits, float32 [len(rows), vocab]."""
        return self._forward(chunks, logit_rows)[0]

    def _forward(
        self, chunks: Mapping[str, Sequence[int]], logit_rows: Sequence[int] | None
    ) -> tuple[torch.Tensor, list[int]]:
        starts, contexts, positions, token_ids = [0], [], [], []
        slots: list[list[int]] = [[] for _ in self.groups]
        for name, ids in chunks.items():
            known = self._known.setdefault(name, [])
            first = len(known)
            known.extend(ids)
            tables = self._pages.setdefault(name, [[] for _ in self.groups])
            for pages, of_group in zip(tables, slots, strict=True):
                while len(pages) * self.page_size < len(known):
                    pages.append(self._free.pop())
                for position in range(first, len(known)):
                    page, offset = divmod(position, self.page_size)
                    of_group.append(pages[page] * self.page_size + offset)
            positions.extend(range(first, len(known)))
            token_ids.extend(ids)
            starts.append(len(token_ids))
            contexts.append(len(known))
        width = max(len(self._pages[name][0]) for name in chunks)
        tables = [
            [self._pages[n][group] + [LEFT] * (width - len(self._pages[n][group])) for n in chunks]
            for group in range(len(self.groups))
        ]
        host = HostBatch(
            token_ids=np.array(token_ids, np.int64),
            query_start=np.array(starts, np.int32),
            context_lens=np.array(contexts, np.int32),
            page_table=np.array(tables, np.int32),
            token_locations=np.array(slots, np.int64),
            positions=np.array(positions, np.int32),
            logit_rows=np.arange(len(token_ids))
            if logit_rows is None
            else np.array(logit_rows, np.int64),
            pending_rows=np.zeros(0, np.int64),
            pending_slots=np.zeros(0, np.int64),
        )
        backend = self.decoder.backend
        batch = backend.prepare(host, self.cache, backend.allocate_slots(1))
        logits = self.decoder.forward(batch, self.cache)
        self._let_go()
        return logits, starts

    def _let_go(self) -> None:
        for name, known in self._known.items():
            for group, pages in zip(self.groups, self._pages[name], strict=True):
                for index in range(first_seen(len(known), group.window) // self.page_size):
                    if pages[index] != LEFT:
                        self.cache.storage[pages[index]] = float("nan")
                        self._free.append(pages[index])
                        pages[index] = LEFT
