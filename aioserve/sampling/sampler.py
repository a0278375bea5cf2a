"""Which token is drawn from a row of logits, and the arrays that say so to a backend.

`temperature` 0 takes the largest logit, the lowest id among equals. Otherwise logits are divided by
`temperature`; `top_k` keeps that many largest; `top_p` keeps the smallest set of the largest
remaining ones whose probabilities, renormalised after `top_k`, reach it, so the token that crosses
it stays (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020). Among equal
logits lower ids come first. Then one uniform number, a function of the row's seed and position
alone, picks a kept token by inverting the cumulative distribution.

`aioserve.ops.Backend.draw` does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aioserve.errors import InvariantError
from aioserve.ops import SampleRows
from aioserve.request import SamplingParams

__all__ = ["SlotTable"]


class SlotTable:
    """How each slot samples, from its start to its end."""

    def __init__(self, num_slots: int) -> None:
        self._started = np.zeros(num_slots, bool)
        self._temperatures = np.zeros(num_slots, np.float64)
        self._top_ks = np.zeros(num_slots, np.int64)
        self._top_ps = np.ones(num_slots, np.float64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._last: tuple[Sequence[int], SampleRows] | None = None
        """The slots asked for last, and their rows, while no slot has started or ended since: from
        one step to the next seldom more than the positions change."""

    def start(self, slot: int, params: SamplingParams, seed: int) -> None:
        """From now on the slot samples so, whatever was in it."""
        self._last = None
        self._started[slot] = True
        self._temperatures[slot] = params.temperature
        self._top_ks[slot] = params.top_k
        self._top_ps[slot] = params.top_p
        self._seeds[slot] = seed

    def end(self, slot: int) -> None:
        """Forget the slot; no harm if it never started."""
        self._last = None
        self._started[slot] = False

    def rows(self, slots: Sequence[int], positions: Sequence[int]) -> SampleRows:
        """A row for each of these slots, which samples the token at the position beside it. For
        reading alone: the next rows may share arrays with these.

        Raises `InvariantError` for a slot that hasn't started.
        """
        positions_array = np.array(positions, np.uint64)
        if self._last is not None and self._last[0] == slots:
            last = self._last[1]
            return SampleRows(
                last.slots, last.temperatures, last.top_ks, last.top_ps, last.seeds, positions_array
            )
        at = np.array(slots, np.int64)
        if not self._started[at].all():
            unknown = at[~self._started[at]].tolist()
            raise InvariantError(f"slots {unknown} sample, but have not started")
        rows = SampleRows(
            slots=at,
            temperatures=self._temperatures[at],
            top_ks=self._top_ks[at],
            top_ps=self._top_ps[at],
            seeds=self._seeds[at],
            positions=positions_array,
        )
        self._last = (slots, rows)
        return rows
