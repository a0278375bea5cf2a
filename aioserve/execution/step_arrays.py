"""Turns a step plan into host arrays. Only this module reads plans for a device.

Knows plans and numpy. Backends take the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.speculation.verified_rows import DrawnRows, VerifiedRows
from aioserve.ops import HostBatch, SampleRows
from aioserve.ops.batch import NOTHING_LEFT
from aioserve.paging.pages import token_locations
from aioserve.request import Logprobs
from aioserve.sampling.asks import RowAsks
from aioserve.sampling.edits import SlotEdits
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.masks import LateMasks
from aioserve.sampling.sampler import SlotTable
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import (
    NO_TOKEN_LEFT,
    PENDING_TOKEN,
    ItemKind,
    SlotStart,
    StepPlan,
    WorkItem,
)

__all__ = ["NO_COPIES", "PlanReader", "StepArrays", "UnresolvedStep", "largest_counts"]

NO_COPIES = np.empty((0, 5), np.int32)


def largest_counts(
    max_tokens: int, max_sequences: int, max_model_len: int
) -> npt.NDArray[np.int64]:
    """Tokens of each sequence of the largest batch, int64 `[B]`.

    The batch has the most sequences first, and then the most tokens: one for each, and more for the
    last ones.
    """
    sequences = min(max_sequences, max_tokens)
    left = max_tokens - sequences - (max_model_len - 1) * np.arange(sequences)
    return 1 + np.clip(left, 0, max_model_len - 1)[::-1]


@dataclass(frozen=True, slots=True)
class UnresolvedStep:
    """A step whose verified items lack only their positions and draft tokens.

    Arrays have a row for each item, in the plan's order.
    """

    copies: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    page_size: int
    samples: SampleRows
    asks: RowAsks
    scored: Sequence[tuple[int, npt.NDArray[np.int32]]]
    masks: LateMasks | None
    pooled: tuple[int, ...]
    spare_slot: int
    """A slot that no sequence has."""
    branch_of: tuple[int, ...] = ()
    """Row that each of the last rows is a branch of (`speculation.branches`)."""

    def resolved(self, plan: StepPlan, *, one_by_one: bool = False) -> StepArrays:
        """Complete the step with the plan that `Resolver.resolved` returned.

        With `one_by_one`, verified tokens are in the batch as sequences of one token each, which
        share their pages.
        """
        items: Sequence[WorkItem] = plan.items
        page_table = self.page_table
        if one_by_one:
            page_table = page_table[:, _repeats(items)]
            items = [single for item in items for single in _singles(item)]
        slots = np.array([item.slot for item in items], np.int64)
        batch = _batch_of(items, slots, page_table, self.page_size)
        verified = VerifiedRows.of(plan, self.branch_of)
        firsts, counts, draft_tokens = verified.firsts, verified.counts, verified.draft_tokens
        positions = [
            item.start + row.offset + 1 + place
            for item in plan.items
            for row in item.rows
            for place in range(item.most_tokens(row))
        ]
        if self.masks is not None:
            self.masks.spread(firsts, draft_tokens)
        asks = self.asks.repeated(counts)
        extras = asks.extras(positions, self.scored, self.masks, draft_tokens)
        samples = self.samples.repeated(counts, np.array(positions, np.uint64))
        if max(counts, default=1) > 1:  # a slot's next token is the last of its rows
            ends = np.cumsum(counts) - 1
            slots = np.full(len(samples.slots), self.spare_slot, np.int64)
            slots[ends] = samples.slots[ends]
            samples = replace(samples, slots=slots)
        return StepArrays(plan.step, self.copies, batch, samples, extras, self.pooled, verified)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Work of a runner for one plan."""

    step: int
    copies: npt.NDArray[np.int32]
    """Copies of pages, as `Backend.copy_pages` takes them: a cache for each tier."""
    batch: HostBatch | None
    """Batch to compute, if there is any."""
    samples: SampleRows
    """Sampled rows, in the plan's order. They use the first of the batch's `logit_rows`. Scored
    targets use the next ones, and pooled tokens the last."""
    extras: RowExtras | None = None
    """Wishes of rows beyond a draw."""
    pooled: tuple[int, ...] = ()
    """Number of pooled tokens of each item that asks for a sum of hidden states. Their rows are
    the last of the batch's `logit_rows`, and need no logits."""
    verified: VerifiedRows | None = None
    """The plan's rows among those of `samples`, if items verify draft tokens."""

    @property
    def masks(self) -> LateMasks | None:
        """Masks of its rows, which may come while it is computed."""
        edits = None if self.extras is None else self.extras.edits
        return None if edits is None else edits.masks

    def outcome(
        self,
        token_ids: list[int],
        row_errors: Mapping[int, str],
        most_likely: tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]] | None = None,
        pooled: Iterable[npt.NDArray[np.float32]] = (),
    ) -> StepOutcome:
        """Make the outcome from a token of each row of `samples`.

        It includes the log-probabilities that `extras` asks for, from values and ids of
        `MostLikely`, and sums of hidden states.
        """
        extras, errors, failures = self.extras, dict(row_errors), {}
        edits = None if extras is None else extras.edits
        if edits is not None:
            # Edits that forbid every token, and failed processors, are no fault of the model.
            own = {row for row, why in errors.items() if why == NOTHING_LEFT and row in edits.rows}
            failures = dict.fromkeys(own, NO_TOKEN_LEFT) | edits.failures
            errors = {row: why for row, why in errors.items() if row not in failures}
        logprobs: dict[int, Logprobs] = {}
        scored: tuple[Logprobs, ...] = ()
        if extras is not None and extras.logprobs is not None and most_likely is not None:
            logprobs, scored = extras.logprobs.read(*most_likely)
        late = frozenset() if edits is None else edits.late - errors.keys() - failures.keys()
        drawn = DrawnRows(token_ids, errors, failures, late, logprobs)
        if self.verified is not None:
            drawn = self.verified.kept(drawn)
        elif late:
            drawn = drawn.without_late()
        return StepOutcome(
            step=self.step,
            token_ids=tuple(drawn.token_ids),
            token_counts=drawn.token_counts,
            drafted={} if self.verified is None else self.verified.drafted,
            branched={} if self.verified is None else self.verified.branched,
            row_errors=drawn.errors,
            row_failures=drawn.failures,
            logprobs=drawn.logprobs,
            scored=scored,
            pooled=tuple(pooled),
        )


class PlanReader:
    """Reads plans in the order of their steps, and remembers how started slots sample.

    Don't change its arrays: some are shared with the previous step.
    """

    def __init__(
        self,
        page_size: int,
        num_slots: int,
        processors: Sequence[Callable[[str], Any]] = (),
        *,
        num_groups: int = 1,
    ) -> None:
        """`processors` are makers of logits processors, by number; more may be appended.

        A slot has `num_groups` page tables, one for each group of layers.
        """
        self._processors = processors
        self._page_size = page_size
        self._tables = SlotPageTables(num_slots, num_groups)
        self._slots = SlotTable(num_slots)
        self._num_slots = num_slots
        self._tops_scored = [0] * num_slots
        """Number of most likely tokens to report for prompt positions, by slot."""
        self._rows = np.arange(0)
        self._query_start = np.arange(1, dtype=np.int32)

    def read(self, plan: StepPlan, masks: LateMasks | None = None) -> StepArrays:
        """Read a plan.

        Raises `InvariantError` for a row of a slot that hasn't started, an item whose slot lacks
        pages, and work that this runner can't do. Slots have ended, started and changed all the
        same.
        """
        step = self.read_unresolved(plan, masks)
        if isinstance(step, UnresolvedStep):
            raise InvariantError(
                f"step {plan.step} verifies draft tokens, which this runner can't compute"
            )
        return step

    def read_unresolved(
        self, plan: StepPlan, masks: LateMasks | None = None
    ) -> StepArrays | UnresolvedStep:
        """Read a plan, leaving it unresolved if items verify draft tokens. Raises as `read`
        does."""
        for slot in plan.ended_slots:
            self._slots.end(slot)
        for start in plan.started_slots:
            self._start(start)
        self._tables.take(plan)
        copies = _copies(plan.copies) if plan.copies else NO_COPIES
        items = plan.items
        if not items:
            return StepArrays(plan.step, copies, None, self._slots.rows([], []))
        item_slots = slots = [item.slot for item in items]
        if plan.num_decodes == len(items):  # as in most steps
            positions = [item.start + 1 for item in items]
        else:
            slots = [row.slot for item in items for row in item.rows]
            positions = [item.start + row.offset + 1 for item in items for row in item.rows]
        samples = self._slots.rows(slots, positions)
        places = samples.slots if slots is item_slots else np.array(item_slots)
        scored, pooled = [], ()
        if plan.num_scored or plan.num_pooled:
            scored = [
                (self._tops_scored[item.slot], item.scored.target_ids)
                for item in items
                if item.scored is not None
            ]
            pooled = tuple([item.pooled.count for item in items if item.pooled is not None])
        if plan.num_verified:
            ends = np.array([item.index_end for item in items], np.int64)
            page_table = self._tables.rows(places, ends, self._page_size)
            asks = self._slots.asks(slots)
            return UnresolvedStep(
                copies,
                page_table,
                self._page_size,
                samples,
                asks,
                scored,
                masks,
                pooled,
                spare_slot=self._num_slots,
            )
        batch = self._batch(plan, places)
        extras = self._slots.extras(slots, positions, scored, masks)
        return StepArrays(plan.step, copies, batch, samples, extras, pooled)

    def _start(self, start: SlotStart) -> None:
        params, edits = start.params, None
        if params.edits_logits:
            edits = SlotEdits(
                params,
                prompt_tokens=start.prompt_tokens,
                of_logprobs=start.edits_logprobs,
                known_ids=start.known_ids,
                end_ids=start.end_ids,
                bad_word_ids=start.bad_word_ids,
                processors=[
                    self._processors[number](text)
                    for number, text in zip(
                        start.logits_processors, params.logits_processors, strict=True
                    )
                ],
            )
        self._slots.start(start.slot, params, start.seed, edits)
        self._tops_scored[start.slot] = params.prompt_logprobs or 0

    def _batch(self, plan: StepPlan, slots: npt.NDArray[np.int64]) -> HostBatch:
        """Lay out the items one after the other; `slots` are theirs."""
        items, size = plan.items, len(plan.items)
        if plan.num_decodes != size:
            ends = np.array([item.index_end for item in items], np.int64)
            page_table = self._tables.rows(slots, ends, self._page_size)
            return _batch_of(items, slots, page_table, self._page_size)
        starts = np.array([item.start for item in items], np.int64)
        indices = np.array([item.index for item in items], np.int64)
        if size != len(self._rows):
            self._rows = np.arange(size)
            self._query_start = np.arange(size + 1, dtype=np.int32)
        page_table = self._tables.rows(slots, indices + 1, self._page_size)
        arranged = self._query_start, self._rows, starts, indices, indices + 1, self._rows
        return _arranged(items, slots, page_table, self._page_size, *arranged)


def _repeats(items: Sequence[WorkItem]) -> npt.NDArray[np.int64]:
    counts = [item.count if item.kind is ItemKind.VERIFY else 1 for item in items]
    return np.repeat(np.arange(len(items)), counts)


def _singles(item: WorkItem) -> Sequence[WorkItem]:
    """Split an item that verifies into a decode for each token; return others as they are."""
    if item.kind is not ItemKind.VERIFY:
        return (item,)
    return [
        WorkItem(
            ItemKind.DECODE,
            item.sequence_id,
            item.slot,
            item.start + place,
            item.index + place,
            1,
            item.token_ids[place : place + 1],
            item.rows,
        )
        for place in range(item.count)
    ]


def _batch_of(
    items: Sequence[WorkItem],
    slots: npt.NDArray[np.int64],
    page_table: npt.NDArray[np.int32],
    page_size: int,
) -> HostBatch:
    """Lay out items of these slots one after the other. `page_table` has their pages."""
    starts = np.array([item.start for item in items], np.int64)
    firsts = np.array([item.index for item in items], np.int64)
    counts = np.array([item.count for item in items], np.int64)
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    rows = np.repeat(np.arange(len(items)), counts)
    positions = np.arange(len(rows)) + (starts - query_start[:-1])[rows]
    indices = positions - (starts - firsts)[rows]
    logit_rows = _logit_rows(items, query_start)
    arranged = query_start, rows, positions, indices, firsts + counts, logit_rows
    return _arranged(items, slots, page_table, page_size, *arranged)


def _arranged(
    items: Sequence[WorkItem],
    slots: npt.NDArray[np.int64],
    page_table: npt.NDArray[np.int32],
    page_size: int,
    query_start: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    logit_rows: npt.NDArray[np.int64],
) -> HostBatch:
    token_ids = np.concatenate([item.token_ids for item in items]).astype(np.int64)
    pending = np.flatnonzero(token_ids == PENDING_TOKEN)
    return HostBatch(
        token_ids=token_ids,
        query_start=query_start,
        context_lens=ends.astype(np.int32),
        page_table=page_table,
        token_locations=token_locations(page_table, rows, indices, page_size),
        positions=positions.astype(np.int32),
        logit_rows=logit_rows,
        pending_rows=pending,
        pending_slots=slots[rows[pending]],
    )


def _logit_rows(
    items: Sequence[WorkItem], query_start: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Rows of sampled tokens, then of scored tokens, then of pooled ones."""
    sampled, scored_rows, pooled_rows = [], [], []
    for first, item in zip(query_start.tolist(), items, strict=False):
        for row in item.rows:
            begin = first + row.offset
            sampled += range(begin, begin + item.most_tokens(row))
        if (scored := item.scored) is not None:
            begin = first + scored.offset
            scored_rows += range(begin, begin + len(scored))
        if (pooled := item.pooled) is not None:
            pooled_rows += range(first + pooled.offset, first + pooled.offset + pooled.count)
    return np.array(sampled + scored_rows + pooled_rows, np.int64)


def _copies(copies: Sequence[PageCopy]) -> npt.NDArray[np.int32]:
    rows = [
        (copy.from_tier, copy.source, copy.to_tier, copy.target, copy.num_tokens) for copy in copies
    ]
    return np.array(rows, np.int32).reshape(-1, 5)
