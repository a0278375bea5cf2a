"""Masks of tokens that may be drawn, which come while the forward pass of a step runs.

    event loop   launch 8 ──────── token of 7 ─► grammar ─► bring ──┐
    step thread  forward pass of 7 ─ draw 7 ─ forward pass of 8 ────┴► found ─ draw 8

Each draft token after a row needs a mask of its own, made as if the ones before it stood. Draft
tokens are known when the step begins, and their masks are asked for then (`LateMasks.spread`).

A row whose mask doesn't come in time isn't sampled, and the others go on. Its sequence keeps its
slot and its pages. When the mask is there, its last token is computed once more, with or without a
prefix cache. Results of steps in flight after it are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["WAIT_SECONDS", "LateMasks", "Mask"]

Mask = npt.NDArray[np.int32]
"""int32 `[ceil(V / 32)]` for V logits. Bit `i % 32` of word `i // 32` is set if id `i` may be
drawn."""

WAIT_SECONDS = 0.002
"""Seconds that the sampling of a step waits for masks after the previous step has ended. A mask
takes about a tenth of it, and was asked for when the forward pass began."""


class LateMasks:
    """Masks of one step, brought on one thread and looked for on another."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows: frozenset[int] = frozenset(rows)
        """Indices of the rows that need a mask."""
        self._missing = set(self.rows)
        self._found: list[tuple[int, Mask]] = []
        self._complete = threading.Event()
        self._lock = threading.Lock()
        self.wait_for_step_before: Callable[[], object] | None = None
        """Waits until the previous step has ended, from whose tokens the masks are made. None if it
        has ended before masks are looked for."""
        self.late: frozenset[int] | None = None
        """Rows that had no mask when the step was sampled; None until then."""
        self.ask: Callable[[int, Sequence[int]], object] | None = None
        """Asks for the masks after a row, made as if these draft tokens stood from the row on.
        `bring_behind` brings them. None: there are no masks for draft tokens."""
        self._places: Mapping[int, int] | None = None
        """Places of rows among those drawn from, if they differ from their indices."""
        self._unknown: set[int] = set()
        """Rows of draft tokens that will have no mask."""

    def bring(self, row: int, mask: Mask | None) -> None:
        """Bring the mask of a row; None if its token will be dropped. A mask that comes too late
        does no harm."""
        with self._lock:
            if self._places is not None:
                row = self._places.get(row, -1)
            self._bring(row, mask)

    def bring_behind(self, row: int, num_draft_tokens: int, masks: Sequence[Mask]) -> None:
        """Bring the masks of the first rows after a row with `num_draft_tokens` draft tokens. The
        others have none."""
        with self._lock:
            first = row if self._places is None else self._places[row]
            behind = range(first + 1, first + 1 + num_draft_tokens)
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

    def spread(self, firsts: Sequence[int], draft_tokens: Mapping[int, Sequence[int]]) -> None:
        """Make room for the rows of draft tokens: row `i` is now number `firsts[i]` of those drawn
        from. After it comes a row for each of the draft tokens `draft_tokens` of that number.

        From now on `rows`, `found` and `late` use the new numbers.
        """
        asked = [
            (row, draft_tokens[firsts[row]]) for row in self.rows if firsts[row] in draft_tokens
        ]
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
        """Wait until all masks have come or the time is over, and return those that have. From the
        first call on, `late` names the rows without one."""
        if self.late is None and self._missing:
            if self.wait_for_step_before is not None:
                self.wait_for_step_before()
            self._complete.wait(WAIT_SECONDS if wait_seconds is None else wait_seconds)
        with self._lock:
            if self.late is None:
                self.late = frozenset(self._missing | self._unknown)
            return self._found
