"""Sampling parameters of slots, as arrays by which a backend draws tokens from rows of logits.

`temperature` 0 takes the largest logit, and the lowest id among equals. Otherwise logits are
divided by `temperature`. Then come these limits, in the order of the transformers library, each on
what the previous ones have left:

    top_k      keeps that many largest
    top_p      keeps the smallest set of the largest whose probabilities reach it, so the token that
               crosses it stays (Holtzman et al., "The curious case of neural text degeneration",
               ICLR 2020)
    min_p      keeps what is at least that many times as likely as the most likely token (Nguyen et
               al., "Turning up the heat: min-p sampling", ICLR 2025)
    typical_p  keeps the tokens whose -log(p) is nearest to the entropy, until their probabilities
               reach it, with all that are as near as the last (Meister et al., "Locally typical
               sampling", TACL 2023)

Probabilities are renormalised each time. Among equal logits lower ids come first.

Then the tokens that are kept race. Each has an exponentially distributed number E, which depends
only on the row's seed and position and on the token's id (`aioserve.ops.philox`). The one with the
least E / p wins, and the lowest id among equals. A token wins with its probability p.

Suppose two rows have the same seed and position, and the distributions over the kept tokens are at
a distance d of total variation. They draw the same token with probability (1 - d) / (1 + d) or
more. See Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024.

`aioserve.ops.Backend.draw` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.ops import SampleRows
from aioserve.request import SamplingParams
from aioserve.sampling.asks import RowAsks
from aioserve.sampling.edits import SlotEdits
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.masks import LateMasks
from aioserve.sampling_params import COLUMNS

__all__ = ["SlotTable"]


class SlotTable:
    """Sampling parameters of each slot, from its start to its end."""

    def __init__(self, num_slots: int) -> None:
        self._started = np.zeros(num_slots, bool)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.full(num_slots, column.idle, column.dtype) for name, column in COLUMNS.items()
        }
        """Columns by the names of the parameters."""
        self._seeds = np.zeros(num_slots, np.uint64)
        self._edits: dict[int, SlotEdits] = {}
        self._logprobs: dict[int, int] = {}
        """Number of most likely tokens wanted, by slot. Slots that want none are absent."""
        self._last: tuple[Sequence[int], SampleRows] | None = None
        """Slots asked for last, and their rows, until a slot starts or ends. From one step to the
        next, often only the positions change."""

    def start(
        self, slot: int, params: SamplingParams, seed: int, edits: SlotEdits | None = None
    ) -> None:
        """Start a slot with these parameters, and forget what was in it."""
        self.end(slot)
        if edits is not None:
            self._edits[slot] = edits
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs
        self._started[slot] = True
        for name, column in self._columns.items():
            column[slot] = getattr(params, name)
        self._seeds[slot] = seed

    def end(self, slot: int) -> None:
        """Forget the slot. Does nothing if it never started."""
        self._last = None
        self._started[slot] = False
        self._edits.pop(slot, None)
        self._logprobs.pop(slot, None)

    def rows(self, slots: Sequence[int], positions: Sequence[int]) -> SampleRows:
        """Return a row for each of these slots, which samples the token at its position. Read-only:
        the next rows may share arrays with these.

        Raises `InvariantError` for a slot that hasn't started.
        """
        positions_array = np.array(positions, np.uint64)
        if self._last is not None and self._last[0] == slots:
            return self._last[1].at(positions_array)
        at = np.array(slots, np.int64)
        if not self._started[at].all():
            unknown = at[~self._started[at]].tolist()
            raise InvariantError(f"slots {unknown} sample, but have not started")
        columns = {name: column[at] for name, column in self._columns.items()}
        rows = SampleRows(at, columns, self._seeds[at], positions_array)
        self._last = (slots, rows)
        return rows

    def asks(self, slots: Sequence[int]) -> RowAsks:
        """Wishes of a row of each of these slots, as they are now."""
        edits, wanted = self._edits, self._logprobs
        return RowAsks(
            [edits.get(slot) for slot in slots] if edits else (),
            [wanted.get(slot) for slot in slots] if wanted else (),
        )

    def extras(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        scored: Sequence[tuple[int, npt.NDArray[np.int32]]] = (),
        masks: LateMasks | None = None,
    ) -> RowExtras | None:
        """Extras that the same rows ask for beyond a draw; None without any.

        `scored` gives the number of most likely tokens beside each of these targets, int32 `[N]`.
        Their rows of logits come after all that are sampled. `masks` are of the same rows.
        """
        if not (self._edits or self._logprobs or scored or masks is not None):
            return None
        return self.asks(slots).extras(positions, scored, masks)
