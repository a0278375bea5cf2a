"""Tokens from the logits of the native backend, of which the largest of each row is known.

Each row is computed by itself, with the same operations in any batch. Its neighbours, its place in
memory and the number of threads don't change its token.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.batch import Drawn, SampleRows, row_error

__all__ = ["Largest", "NativeSampler"]


class Largest:
    """Largest logits of up to `rows` rows: for each the first of the largest, or the first NaN."""

    __slots__ = ("addresses", "columns", "values")

    def __init__(self, rows: int) -> None:
        self.values: npt.NDArray[np.float32] = np.empty(rows, np.float32)
        self.columns: npt.NDArray[np.int64] = np.empty(rows, np.int64)
        self.addresses: tuple[int, int] = self.values.ctypes.data, self.columns.ctypes.data
        """Addresses, asked for once: numpy makes an object each time."""

    def look_again(self, logits: Tensor, rows: Collection[int]) -> None:
        """Search these rows of `logits`, float32 `[S, V]` contiguous, again, because they were
        changed."""
        _native.largest_of(logits.data_ptr(), *logits.shape, list(rows), *self.addresses)


class NativeSampler:
    """Draws tokens, and keeps room for the largest logits. Not thread-safe."""

    def __init__(self) -> None:
        self._largest = Largest(64)

    def room(self, rows: int) -> Largest:
        """Return room for this many rows or more. The next call reuses it."""
        if len(self._largest.values) < rows:
            self._largest = Largest(2 * rows)
        return self._largest

    def draw(
        self,
        largest: Largest,
        logits: npt.NDArray[np.float32] | None,
        rows: SampleRows,
        last_tokens: Tensor,
    ) -> Drawn:
        """Draw as `Backend.draw` does; `largest` has the first S rows.

        `logits`, float32 `[S, V]`, may be None if all rows are greedy. Greedy rows of it may hold
        anything.
        """
        count = len(rows.slots)
        values, token_ids = largest.values[:count], largest.columns[:count].copy()
        errors = {}
        # A loop, since a step comes with cold caches and few rows.
        for row, value in enumerate(values.tolist()):
            if not math.isfinite(value) and (error := row_error(value)) is not None:
                errors[row] = error
                token_ids[row] = 0
        if logits is not None:
            drawn = rows["temperature"] > 0
            drawn[list(errors)] = False
            if drawn.any():
                _draw(np.flatnonzero(drawn), logits, values, rows, token_ids)
        tokens = torch.from_numpy(token_ids)
        last_tokens.numpy()[rows.slots] = token_ids
        return Drawn(tokens, errors)

    def probabilities(self, largest: Largest, logits: Tensor, rows: SampleRows) -> Tensor:
        """Compute `Backend.probabilities` from contiguous logits; `largest` has the first S
        rows."""
        count = len(rows.slots)
        values, columns = largest.values[:count], largest.columns[:count]
        found = np.zeros(logits.shape, np.float32)
        good, drawn = np.isfinite(values), rows["temperature"] > 0
        greedy = np.flatnonzero(good & ~drawn)
        found[greedy, columns[greedy]] = 1
        if (weighed := np.flatnonzero(good & drawn)).size:
            _native.probabilities(
                logits.data_ptr(),
                logits.shape[1],
                values.ctypes.data,
                found.ctypes.data,
                *_parameters(rows),
                weighed,
            )
        return torch.from_numpy(found)


def _draw(
    drawn: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
    largest: npt.NDArray[np.float32],
    rows: SampleRows,
    token_ids: npt.NDArray[np.int64],
) -> None:
    """Draw tokens for the rows `drawn`, which are not greedy and have no error."""
    _native.draw(
        logits.ctypes.data,
        logits.shape[1],
        largest.ctypes.data,
        token_ids.ctypes.data,
        *_parameters(rows),
        drawn,
    )


def _parameters(rows: SampleRows) -> tuple[npt.NDArray[Any], ...]:
    return (
        rows["temperature"],
        rows["top_k"],
        rows["top_p"],
        rows["min_p"],
        rows["typical_p"],
        rows.seeds,
        rows.positions,
    )
