"""Tokens from the logits of the native backend, of which the largest of each row is known.

Each row is worked out by itself, in the same operations whatever its neighbours and its place in
memory, so its token is the same in any batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.ops.batch import Drawn, SampleRows
from aioserve.ops.draws import RowSampler, row_error
from aioserve.ops.philox import uniforms

__all__ = ["Largest", "NativeSampler"]


class Largest:
    """Room for `rows` rows: of each the first of the largest logits, or the first NaN."""

    __slots__ = ("addresses", "columns", "values")

    def __init__(self, rows: int) -> None:
        self.values: npt.NDArray[np.float32] = np.empty(rows, np.float32)
        self.columns: npt.NDArray[np.int64] = np.empty(rows, np.int64)
        self.addresses: tuple[int, int] = self.values.ctypes.data, self.columns.ctypes.data
        """Asked for once: numpy makes an object for each question."""


class NativeSampler:
    """Keeps the buffers of its draws. Not thread-safe."""

    def __init__(self) -> None:
        self._largest = Largest(64)
        self._sampler: RowSampler | None = None

    def room(self, rows: int) -> Largest:
        """For this many rows or more; the next call gives the same again."""
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
        """As `Backend.draw`, of which `largest` has the first S rows.

        `logits`, float32 `[S, V]`, may be None where all rows are greedy.
        """
        values, token_ids = largest.values[: len(rows)], largest.columns[: len(rows)].copy()
        errors = {}
        # A loop, since a step comes with cold caches and few rows.
        for row, value in enumerate(values.tolist()):
            if (error := row_error(value)) is not None:
                errors[row] = error
                token_ids[row] = 0
        if logits is not None:
            self._draw_others(values, logits, rows, token_ids, errors)
        tokens = torch.from_numpy(token_ids)
        last_tokens.numpy()[rows.slots] = token_ids
        return Drawn(tokens, errors)

    def _draw_others(
        self,
        largest: npt.NDArray[np.float32],
        logits: npt.NDArray[np.float32],
        rows: SampleRows,
        token_ids: npt.NDArray[np.int64],
        errors: dict[int, str],
    ) -> None:
        """The rows that are not greedy."""
        drawn = np.flatnonzero(rows.temperatures > 0)
        noise = uniforms(rows.seeds[drawn], rows.positions[drawn]).tolist()
        sampler, vocab = self._sampler, logits.shape[1]
        if sampler is None or sampler.vocab != vocab:
            sampler = self._sampler = RowSampler(vocab)
        for i, uniform in zip(drawn.tolist(), noise, strict=True):
            if i in errors:
                continue
            token_ids[i] = sampler.draw(
                logits[i],
                largest[i],
                uniform,
                temperature=float(rows.temperatures[i]),
                top_k=int(rows.top_ks[i]),
                top_p=float(rows.top_ps[i]),
            )
