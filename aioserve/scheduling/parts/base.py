"""Contract of a part: one thing that the rows of a step may be asked for.

    when                          the scheduler calls
    an item is planned            `ask`: what the part adds to it
    its step is committed         `take`: what the outcome says, of all rows of the step at once
    launched steps are discarded  `drop_launched`: the sequence begins again, or goes back
    KV may be wrong               `distrust`: what was taken may be wrong as well
    planning failed               `keep`: what an item asks for without some of its sequences
    a step failed                 `first_written`: which tokens it may have written
    the simulator passes steps    `is_beyond_a_token` and `go_on_by_one`

A step calls the parts that its rows are asked for. Once a request has had draft tokens, every step
calls `Verify` too, which learns from each. A step of plain decodes calls `Draw` alone. Parts are
stateless: sequences and the scheduler hold the state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from aioserve.kv.memory import KVMemory
from aioserve.scheduling.sequence import Entry, PageIds, Run, SequenceState
from aioserve.scheduling.speculation.drafts import Speculation
from aioserve.scheduling.updates import SchedulerCounters, SequenceUpdate
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan, WorkItem

__all__ = ["BrokenRow", "DoneStep", "ItemTokens", "LateRow", "RowPart"]


class ItemTokens(NamedTuple):
    """Positions `[start, end)` of a sequence, which a step computes in one item."""

    sequence: SequenceState
    start: int
    end: int
    family: Sequence[SequenceState] = ()
    """Sequences that get a token after these: its own, and samples that fork off it here."""


class BrokenRow(NamedTuple):
    """A row whose logits were not numbers."""

    run: Run
    item: WorkItem
    page_ids: PageIds
    """Pages that the item reads."""
    error: str


class LateRow(NamedTuple):
    """A row whose mask came late, or that verifies a token which turned out wrong."""

    run: Run
    item: WorkItem
    num_taken: int
    """Leading tokens of the row that count."""


class DoneStep(msgspec.Struct, kw_only=True):
    """A step that is done, with what parts have made of it so far."""

    plan: StepPlan
    outcome: StepOutcome
    now_seconds: float
    seconds: float
    """Duration of the step in seconds; 0 if it wasn't measured."""
    entries: list[Entry]
    rows: list[Entry]
    """Entries with a row, in the order of the outcome's rows."""
    memory: KVMemory
    counters: SchedulerCounters
    speculation: Speculation
    updates: list[SequenceUpdate] = []
    ended: list[SequenceState] = []
    broken: list[BrokenRow] = []
    late: list[LateRow] = []
    known_rows: set[int] = set()
    """Indices of rows whose tokens are known already."""
    num_taken: dict[int, int] = {}
    """Maps the index of a verifying row to the tokens taken from it, at least 1."""


class RowPart:
    """One thing that rows may be asked for. The methods of this base class change nothing."""

    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        """Return fields to add to the item of these tokens, and move the sequence past them. Empty
        if nothing is asked for."""
        return {}

    def take(self, step: DoneStep) -> None:
        """Take in the outcome of a step. Once all parts have done so, sequences in `step.ended`
        end, and rows in `step.broken` and `step.late` are handled."""

    def drop_launched(self, sequence: SequenceState) -> None:
        """Discard what steps already launched bring for a sequence."""

    def distrust(self, sequence: SequenceState) -> None:
        """Handle a sequence that is about to begin again because the KV that it read may be
        wrong."""

    def keep(self, item: WorkItem, slots: Set[int], sequence_ids: Set[int]) -> dict[str, Any]:
        """Return changed fields of a planned item once all sequences but these have left it."""
        return {}

    def first_written(self, item: WorkItem, num_known: int) -> int:
        """Position of the first token that a failed item may have written. The steps before it are
        done, and its sequence has `num_known` known tokens."""
        return item.start

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        """True if an item is asked for more than one token of its sequence."""
        return False

    def go_on_by_one(self, sequences: Collection[SequenceState]) -> bool:
        """True if a step can bring one token for each of these decoding sequences, as far as this
        part is concerned."""
        return True
