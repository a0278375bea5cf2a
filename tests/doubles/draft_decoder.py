"""A draft model that predicts `FakeDevice` from the token ids in its own pages. If they hold other
ids, it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioserve.ops import Drawn, HostBatch, SampleRows
from aioserve.testing import expected_tokens

__all__ = ["DraftDecoder", "TokenPages"]

JUNK = 299


class TokenPages:
    """The part of a KV cache that a draft model reads: pages of token ids."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.ids: npt.NDArray[np.int64] = np.full((num_pages, page_size), JUNK, np.int64)


class DraftDecoder:
    """Decoder and backend in one. `most_at_once` is the largest number of tokens that it has
    computed in one batch. It is wrong about the tokens at the positions `wrong_at`."""

    def __init__(self, max_model_len: int = 10**6) -> None:
        self.max_model_len = max_model_len
        self.most_at_once = 0
        self.rows_without_token: frozenset[int] = frozenset()
        self.wrong_at: frozenset[int] = frozenset()

    @property
    def backend(self) -> Any:
        return self

    def allocate_slots(self, num_slots: int) -> torch.Tensor:
        return torch.zeros(num_slots, dtype=torch.int64)

    def prepare(self, host: HostBatch, kv: TokenPages, last_tokens: torch.Tensor) -> HostBatch:
        return host

    def copy_pages(self, caches: Sequence[TokenPages], copies: npt.NDArray[np.int32]) -> None:
        for source_cache, source, target_cache, target, count in copies.tolist():
            caches[target_cache].ids[target, :count] = caches[source_cache].ids[source, :count]
            caches[target_cache].ids[target, count:] = JUNK

    def forward(self, host: HostBatch, kv: TokenPages) -> None:
        assert host.context_lens.max() <= self.max_model_len
        self.most_at_once = max(self.most_at_once, len(host.token_ids))
        kv.ids.reshape(-1)[host.token_locations[0]] = host.token_ids

    def draw(
        self, host: HostBatch, kv: TokenPages, rows: SampleRows, last_tokens: torch.Tensor
    ) -> Drawn:
        self.forward(host, kv)
        tokens: list[int] = []
        for row, seed, position in zip(host.logit_rows, rows.seeds, rows.positions, strict=True):
            sequence = int(np.searchsorted(host.query_start, row, side="right")) - 1
            assert position == host.positions[row] + 1
            known = kv.ids[host.page_table[0, sequence]].reshape(-1)[: int(position)]
            (token,) = expected_tokens(known.tolist(), 1, int(seed))
            tokens.append(token + (int(position) in self.wrong_at))
        errors = dict.fromkeys(self.rows_without_token, "the logits have a NaN")
        return Drawn(torch.tensor(tokens), errors)
