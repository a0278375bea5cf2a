"""Log-probabilities of tokens, from the logits that the model gave.

Natural logarithms of the softmax over the whole vocabulary, before any edits of a request. For
beams, after their edits. Knows torch, on any device, and no backend.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.request import Logprobs, TopLogprob
from aioserve.sampling.uploads import upload

__all__ = ["LogprobRows", "MostLikely", "highest"]

ROWS_AT_ONCE = 32
"""Rows of logits that are copied at once."""


class LogprobRows:
    """R rows of logits whose tokens' log-probabilities are wanted.

    Sampled rows come first: `sampled` are their indices among the rows of the step. Then, from row
    `first_scored` on, comes one for each of `target_ids`, int64, which are known. The `i`-th row
    wants `tops[i]` of the most likely tokens. Sampled rows with an index in `edited` are
    log-probabilities already, whatever they sum to.
    """

    def __init__(
        self,
        sampled: Sequence[int],
        tops: Sequence[int],
        *,
        first_scored: int,
        target_ids: npt.NDArray[np.int64],
        edited: Collection[int] = (),
    ) -> None:
        self.sampled: list[int] = list(sampled)
        self.target_ids = target_ids
        scored = range(first_scored, first_scored + len(target_ids))
        self.rows: list[int] = [*self.sampled, *scored]
        self.width: int = max(tops, default=0)
        """K: the most tokens wanted of any row."""
        self.edited: list[int] = [at for at, row in enumerate(self.sampled) if row in edited]
        """Places of edited rows in `rows`."""
        self.tops: list[int] = list(tops)
        """Most likely tokens wanted of each row."""

    def __len__(self) -> int:
        return len(self.rows)

    def read(
        self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]
    ) -> tuple[dict[int, Logprobs], tuple[Logprobs, ...]]:
        """Results of `MostLikely` on the host: by index of a sampled row, and for the targets in
        order."""
        every: list[Logprobs] = []
        for row, count in enumerate(self.tops):
            top = zip(ids[row, :count].tolist(), values[row, 1 : 1 + count].tolist(), strict=True)
            pairs = tuple([TopLogprob(id, logprob) for id, logprob in top])
            every.append(Logprobs(values[row, 0].item(), pairs))
        sampled = len(self.sampled)
        return dict(zip(self.sampled, every[:sampled], strict=True)), tuple(every[sampled:])


class MostLikely:
    """Log-probabilities of one step, on its device, from `logits`, float32 `[S + N, V]` with V at
    least K.

    The logits stay unchanged, and are the model's own except for edited rows. Takes all memory when
    it is made.
    """

    def __init__(self, wanted: LogprobRows, logits: Tensor) -> None:
        device, count, width = logits.device, len(wanted), wanted.width
        rows = upload(wanted.rows, np.int64, device)
        self.values: Tensor = torch.empty((count, 1 + width), dtype=torch.float32, device=device)
        """float32 `[R, 1 + K]`: log-probability of the token drawn or given, then of the most
        likely ones."""
        self.ids: Tensor = torch.empty((count, width), dtype=torch.int32, device=device)
        """int32 `[R, K]`: the most likely ones, in falling order."""
        self._logits = logits
        self._sampled = rows[: len(wanted.sampled)]
        self._places = rows * logits.shape[1]
        """Flat index of each row's first logit."""
        self._tokens = torch.empty(count, dtype=torch.int64, device=device)
        self._tokens[len(wanted.sampled) :] = upload(wanted.target_ids, np.int64, device)
        self._sums = torch.empty(count, dtype=torch.float32, device=device)
        self._of_tokens = torch.empty(count, dtype=torch.float32, device=device)
        may_wait = device.type == "cpu"
        for start in range(0, count, ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            found = logits.index_select(0, rows[part])
            self._sums[part] = torch.logsumexp(found, dim=1)
            self.values[part, 1:], self.ids[part] = highest(found, width, may_wait=may_wait)
        if wanted.edited:
            self._sums.index_fill_(0, upload(wanted.edited, np.int64, device), 0.0)
        self.values[:, 1:] -= self._sums[:, None]

    def note(self, token_ids: Tensor) -> None:
        """Note the tokens drawn: `token_ids`, int64 `[S]`."""
        sampled = self._tokens[: len(self._sampled)]
        torch.index_select(token_ids, 0, self._sampled, out=sampled)
        torch.add(self._tokens, self._places, out=self._tokens)
        torch.take(self._logits, self._tokens, out=self._of_tokens)
        torch.sub(self._of_tokens, self._sums, out=self._of_tokens)
        self.values[:, 0] = self._of_tokens


def highest(rows: Tensor, count: int, *, may_wait: bool) -> tuple[Tensor, Tensor]:
    """Return the `count` highest numbers of each row `[R, V]`, in falling order, and their columns,
    int64: `[R, count]` both. Among equal numbers the one in the lowest column comes first.

    If several equal the last one, `torch.topk` takes any of them, and others for another `count`.
    With `may_wait`, the host waits for the device and looks which rows that concerns.
    """
    found = torch.topk(rows, min(count + 1, rows.shape[1]), dim=1)
    values, ids, beyond = found.values[:, :count], found.indices[:, :count], found.values[:, count:]
    if count and beyond.shape[1]:
        if not may_wait:
            ids = _lowest_of_equal(rows, values, ids)
        elif len(cut := (values[:, -1:] == beyond).nonzero()[:, 0]):
            ids[cut] = _lowest_of_equal(rows[cut], values[cut], ids[cut])
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _lowest_of_equal(rows: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Columns of the highest numbers, where the lowest equal the last of `values`."""
    columns, count = rows.shape[1], values.shape[1]
    last = values[:, -1:]
    every = torch.arange(columns, dtype=torch.int32, device=rows.device)
    equal = torch.where(rows == last, every, columns)
    lowest = torch.topk(equal, count, dim=1, largest=False).values.clamp(max=columns - 1)
    place = torch.arange(count, device=rows.device) - (values > last).sum(1, keepdim=True)
    return torch.where(place < 0, ids, lowest.gather(1, place.clamp(min=0)).to(ids.dtype))
