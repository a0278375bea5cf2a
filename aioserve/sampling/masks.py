"""Masks of what may be drawn from rows of a step, which come while its forward pass runs.

    event loop   launch 8 ──────── token of 7 ─► grammar ─► bring ──┐
    step thread  forward pass of 7 ─ draw 7 ─ forward pass of 8 ────┴► found ─ draw 8

A row whose mask doesn't come in time isn't sampled, and the others go on. Its sequence keeps its
slot and its pages. When the mask is there, its last token is computed once more, with or without a
prefix cache; what steps in flight computed behind it is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

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

    def bring(self, row: int, mask: Mask | None) -> None:
        """Bring the mask of a row; None where its token will be dropped. A mask that comes too late
        does no harm."""
        with self._lock:
            if row not in self._missing or self.late is not None:
                return
            self._missing.discard(row)
            if mask is not None:
                self._found.append((row, mask))
            if not self._missing:
                self._complete.set()

    def found(self, wait_seconds: float | None = None) -> list[tuple[int, Mask]]:
        """Wait until all masks have come or the time is over; return those that have. From the
        first call on, `late` names the rows without one."""
        if self.late is None and self._missing:
            if self.wait_for_step_before is not None:
                self.wait_for_step_before()
            self._complete.wait(WAIT_SECONDS if wait_seconds is None else wait_seconds)
        with self._lock:
            if self.late is None:
                self.late = frozenset(self._missing)
            return self._found
