"""Masks of what may be drawn from rows of a step, which come while its forward pass runs.

    event loop   launch 8 ──────── token of 7 ─► grammar ─► bring ──┐
    step thread  forward pass of 7 ─ draw 7 ─ forward pass of 8 ────┴► found ─ draw 8

Where a row has guesses behind it, each needs a mask of its own, as if those before it stood: what
is guessed is known when the step begins, and they are asked for then (`LateMasks.spread`).

A row whose mask doesn't come in time isn't sampled, and the others go on. Its sequence keeps its
slot and its pages. When the mask is there, its last token is computed once more, with or without a
prefix cache; what steps in flight computed behind it is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["WAIT_SECONDS", "LateMasks", "Mask"]

Mask = npt.NDArray[np.int32]
"""int32 `[ceil(V / 32)]`, V logits wide: bit `i % 32` of word `i // 32` says whether id `i` may be
drawn."""

WAIT_SECONDS = 0.002
"""Time that the sampling of a step waits for masks, from when the step before has ended. One takes
a tenth of it or so, and was asked for when the forward pass began."""


class LateMasks:
    """The masks of one step, brought on one thread and looked for on another."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows: frozenset[int] = frozenset(rows)
        """Indices of the rows that need a mask."""
        self._missing = set(self.rows)
        self._found: list[tuple[int, Mask]] = []
        self._complete = threading.Event()
        self._lock = threading.Lock()
        self.wait_for_step_before: Callable[[], object] | None = None
        """Returns when the step before has ended, whose tokens masks are made from; None where it
        has ended by the time that masks are looked for."""
        self.late: frozenset[int] | None = None
        """Rows that had no mask when the step was sampled; None until then."""
        self.ask: Callable[[int, Sequence[int]], object] | None = None
        """Asks for the masks of what comes behind a row where its token, and those after it, are
        these guesses: `bring_behind` brings them. None: nobody has such masks."""
        self._places: Mapping[int, int] | None = None
        """Where rows are among those drawn from, if that isn't their index."""
        self._unknown: set[int] = set()
        """Rows behind guesses that will have no mask."""

    def bring(self, row: int, mask: Mask | None) -> None:
        """Bring the mask of a row; None where its token will be dropped. A mask that comes too late
        does no harm."""
        with self._lock:
            if self._places is not None:
                row = self._places.get(row, -1)
            self._bring(row, mask)

    def bring_behind(self, row: int, num_guesses: int, masks: Sequence[Mask]) -> None:
        """Bring the masks of the first rows behind a row with so many guesses; there are none for
        the others."""
        with self._lock:
            first = row if self._places is None else self._places[row]
            behind = range(first + 1, first + 1 + num_guesses)
            for place, mask in zip(behind, masks, strict=False):
                self._bring(place, mask)
            self._unknown.update(behind[len(masks) :])
            for place in behind[len(masks) :]:
                self._bring(place, None)

    def _bring(self, row: int, mask: Mask | None) -> None:
        if row not in self._missing or self.late is not None:
            return
        self._missing.discard(row)
        if mask is not None:
            self._found.append((row, mask))
        if not self._missing:
            self._complete.set()

    def spread(self, firsts: Sequence[int], guesses: Mapping[int, Sequence[int]]) -> None:
        """Row `i` is number `firsts[i]` of those drawn from, and behind it come as many as there
        are `guesses` of that number. From now on `rows`, `found` and `late` speak of these."""
        asked = [(row, guesses[firsts[row]]) for row in self.rows if firsts[row] in guesses]
        behind = [firsts[row] + 1 + n for row, ids in asked for n in range(len(ids))]
        with self._lock:
            self._places = {row: firsts[row] for row in self.rows}
            self._found = [(firsts[row], mask) for row, mask in self._found]
            self._missing = {firsts[row] for row in self._missing}.union(behind)
            self.rows = frozenset([*self._places.values(), *behind])
            if behind:
                self._complete.clear()
        for row, ids in asked:
            if self.ask is None:
                self.bring_behind(row, len(ids), ())
            else:
                self.ask(row, ids)

    def found(self, wait_seconds: float | None = None) -> list[tuple[int, Mask]]:
        """Wait until all masks have come or the time is over; return those that have. From the
        first call on, `late` names the rows without one."""
        if self.late is None and self._missing:
            if self.wait_for_step_before is not None:
                self.wait_for_step_before()
            self._complete.wait(WAIT_SECONDS if wait_seconds is None else wait_seconds)
        with self._lock:
            if self.late is None:
                self.late = frozenset(self._missing | self._unknown)
            return self._found
