"""Draw under a mask: a grammar says which tokens may come next. Some masks arrive while the step
that draws under them runs.

A row whose mask came late brings no token (`LateRow`). `aioserve.scheduling.recovery` then lets its
sequence go on.
"""

from __future__ import annotations

from collections.abc import Collection

from aioserve.scheduling.parts.base import DoneStep, RowPart
from aioserve.scheduling.sequence import SequenceState

__all__ = ["Mask"]


class Mask(RowPart):
    def take(self, step: DoneStep) -> None:
        """Skip rows whose token was forced while they were in flight, so that it is already known
        and reported. Rows with an error or without their mask don't count."""
        errors, counts = step.outcome.row_errors, step.outcome.token_counts
        for index, (run, _, _) in enumerate(step.rows):
            sequence = run.sequence
            if not sequence.forced_in_flight or not run.goes_on or index in errors:
                continue
            if counts.get(index, 1):
                sequence.forced_in_flight -= 1
                step.known_rows.add(index)

    def drop_launched(self, sequence: SequenceState) -> None:
        sequence.forced_in_flight = 0

    def go_on_by_one(self, sequences: Collection[SequenceState]) -> bool:
        return not any(sequence.constrained for sequence in sequences)
