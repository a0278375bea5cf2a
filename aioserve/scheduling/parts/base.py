"""The contract of a part: one thing that the rows of a step may be asked for.

    when                          the scheduler calls
    an item is planned            `ask`: what the part adds to it
    its step is committed         `take`: what the outcome says, of all rows of the step at once
    launched steps count no more  `drop_launched`: the sequence begins again, or goes back
    KV may be wrong               `distrust`: what was taken may be wrong as well
    planning failed               `keep`: what an item asks for without some of its sequences
    a step failed                 `first_written`: which tokens it may have written
    the simulator passes steps    `is_beyond_a_token` and `go_on_by_one`

A step calls the parts that its rows are asked for; `Verify` as well, which learns from each step,
once a request has had draft tokens. A step of plain decodes calls `Draw` alone. Parts have no
state: it is the sequence's, or the scheduler's.
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

__all__ = ["AskedTokens", "BrokenRow", "DoneStep", "LateRow", "RowPart"]


class AskedTokens(NamedTuple):
    """Positions `[start, end)` of a sequence, which a step computes in one item."""

    sequence: SequenceState
    start: int
    end: int
    family: Sequence[SequenceState] = ()
    """Sequences that get a token behind them: its own, and samples that fork off it here."""


class BrokenRow(NamedTuple):
    """A row whose logits were no numbers."""

    run: Run
    item: WorkItem
    page_ids: PageIds
    """Pages that the item reads."""
    error: str


class LateRow(NamedTuple):
    """A row whose mask came late, or one of which a token further on is wrong."""

    run: Run
    item: WorkItem
    num_taken: int
    """Tokens of it that count."""


class DoneStep(msgspec.Struct, kw_only=True):
    """A step that is done, and what parts have made of it so far."""

    plan: StepPlan
    outcome: StepOutcome
    now_seconds: float
    seconds: float
    """How long it took; 0 where nobody measured."""
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
    """Index of a row of an item that verifies -> tokens of it that were taken, at least 1."""


class RowPart:
    """One thing that rows may be asked for. What a part doesn't override changes nothing."""

    def ask(self, asked: AskedTokens) -> dict[str, Any]:
        """Fields that it adds to the item of these tokens, with the sequence moved past them; none
        where nothing is asked for."""
        return {}

    def take(self, step: DoneStep) -> None:
        """Take what the outcome of a step says. Sequences in `step.ended` end once all parts have
        taken theirs; rows in `step.broken` and `step.late` are dealt with then."""

    def drop_launched(self, sequence: SequenceState) -> None:
        """What launched steps bring for a sequence counts no more."""

    def distrust(self, sequence: SequenceState) -> None:
        """A sequence is about to begin again, since the KV that it read may be wrong."""

    def keep(self, item: WorkItem, slots: Set[int], sequence_ids: Set[int]) -> dict[str, Any]:
        """Fields of an item of a plan, once all sequences but these have left it."""
        return {}

    def first_written(self, item: WorkItem, num_known: int) -> int:
        """Position of the first token that a failed item may have written, if the steps before it
        are done and its sequence has `num_known` known tokens."""
        return item.start

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        """True if an item is asked for more than a token of its sequence."""
        return False

    def go_on_by_one(self, sequences: Collection[SequenceState]) -> bool:
        """True if nothing asked of sequences that decode keeps a step from bringing each of them
        one token."""
        return True
