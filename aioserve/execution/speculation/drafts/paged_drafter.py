"""Draft tokens by a model or head with its own KV pages.

    known to the draft      a b c d . . .
    known                   a b c d e f g          the last one is pending
    first batch             e f g          ->  h   what it missed, and the first draft token
    second batch            h              ->  i
    verified                g h i          ->  h x
    known to the draft      a b c d e f g h .      a draft token that was right needs no second look

All slots of a step are computed together, each up to its number of draft tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import DraftedSequence
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter, DraftOptions
from aioserve.execution.speculation.drafts.draft_pages import DraftPages
from aioserve.execution.step_arrays import largest_counts
from aioserve.ops import Backend, Drawn, HostBatch, KVCache, SampleRows
from aioserve.paging.pages import pages_for
from aioserve.steps.plan import StepPlan

__all__ = ["PagedDrafter"]

PageTable = npt.NDArray[np.int32]
Passed = TypeVar("Passed")
"""State that a batch passes on to the next one, which goes on after its draft tokens."""


@dataclass(slots=True)
class _Sequence:
    ids: npt.NDArray[np.int32]
    """int32 `[room]`; the first `known` are known."""
    known: int
    draft_tokens: list[int] = field(default_factory=list[int])
    """Latest draft tokens, after the known ids. The draft has written the KV of all but the
    last."""
    draft_pages: list[int] = field(default_factory=list[int])
    """Pages that this KV was written to, in order of position. The sequence may have other pages
    there once it is known which draft tokens were right."""

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.known + len(token_ids)
        if end > len(self.ids):
            self.ids = np.concatenate((self.ids, np.empty(end, np.int32)))
        self.ids[self.known : end] = token_ids
        self.known = end


@dataclass(slots=True)
class _Work:
    """Positions `[start, end)` of a slot to compute, and `limit` draft tokens to make after them.

    `limit` is 0 unless the positions reach the last known token.
    """

    slot: int
    start: int
    end: int
    limit: int


class PagedDrafter(ComputedDrafter, Generic[Passed]):
    """Base of drafters whose KV pages, `cache`, have the numbers of the target's pages in group 0.

    `max_model_len` is the longest context. A draft that has missed much, like a long prompt,
    catches up over several steps. Until then it makes no draft tokens for the slot.
    """

    lag: int = 0
    """Offset of the token id that a position takes in. It is 1 for a draft that reads the
    target's states: the state of a token is taken in with the next id."""
    keeps_draft_tokens: bool = True
    """True if KV written for a draft token stays valid once the token is accepted."""

    def __init__(
        self, backend: Backend, cache: KVCache, max_model_len: int, options: DraftOptions
    ) -> None:
        super().__init__(backend, options)
        self._cache = cache
        self._max_model_len = min(max_model_len, options.max_model_len)
        self._max_sequences = options.max_sequences
        self._most_tokens = options.most_tokens
        self._pages = DraftPages(cache.num_pages, cache.page_size)
        self._sequences: dict[int, _Sequence] = {}

    @abstractmethod
    def _compute(
        self, host: HostBatch, samples: SampleRows | None, passed: Passed | None
    ) -> tuple[Drawn | None, Passed | None]:
        """Compute a batch with a row of logits for each of `samples`.

        Return the drawn tokens, and the state to pass on to the next batch, which picks rows of it.
        With None for `samples` nothing is drawn. `passed` is the state of the previous batch, if
        this one goes on after its draft tokens.
        """

    def _picked(self, passed: Passed | None, rows: Sequence[int]) -> Passed | None:
        """Pick rows of the state that a batch passed on."""
        return None

    # -- the steps of the target

    def rehearse(self) -> None:
        rows, longest = self._max_sequences, self._max_model_len
        counts = largest_counts(self._most_tokens, rows, longest)
        passed = self._rehearse(counts, longest, None, greedy=False)
        self._rehearse(np.ones(rows, np.int64), longest, passed, greedy=True)
        # Few rows may take other kernels, for long contexts and for short ones.
        for context in (longest, 1):
            self._rehearse(np.ones(1, np.int64), context, None, greedy=True)

    def _rehearse(
        self, counts: npt.NDArray[np.int64], context: int, passed: Passed | None, *, greedy: bool
    ) -> Passed | None:
        """Compute the last `counts` tokens of sequences of length `context`, and draw after them.

        Return the state to pass on.
        """
        rows = len(counts)
        table = np.zeros((1, rows, pages_for(context, self._cache.page_size)), np.int32)
        contexts, ids = np.full(rows, context), np.zeros(counts.sum(), np.int64)
        batch = self._batch(counts, contexts, table, counts.cumsum() - 1, ids)
        return self._compute(batch, self._any_samples(rows, greedy=greedy), passed)[1]

    def take(self, plan: StepPlan) -> None:
        for slot in plan.ended_slots:
            if (sequence := self._sequences.get(slot)) is not None:
                # On a device that runs ahead, `end` comes later, when another sequence has its
                # pages.
                sequence.draft_tokens = []
        super().take(plan)

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._copy(plan)
        for item in plan.items:
            # After wrong draft tokens it begins earlier, at positions already marked as
            # overwritten.
            self._pages.overwritten(self._tables.page_ids(item.slot), item.start, item.end)

    def _copy(self, plan: StepPlan) -> None:
        within: list[tuple[int, int, int, int, int]] = []
        for copy in plan.copies:
            if copy.from_tier == copy.to_tier == 0:
                # The last position may have been taken in with a token id that isn't copied.
                alike = max(0, copy.num_tokens - self.lag)
                self._pages.copied(copy.source, copy.target, alike)
                within.append((0, copy.source, 0, copy.target, copy.num_tokens))
            elif copy.to_tier == 0:
                self._pages.copied(copy.target, copy.target, 0)
        if within:
            self._backend.copy_pages((self._cache,), np.array(within, np.int32))

    # -- the interface of drafters

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._sequences[slot] = _Sequence(sequence.known_ids.copy(), len(sequence.known_ids))

    def end(self, slot: int) -> None:
        del self._sequences[slot]

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for slot, ids in zip(slots, token_ids, strict=True):
            self._extend(slot, ids)

    def _extend(self, slot: int, token_ids: Sequence[int]) -> None:
        sequence = self._sequences[slot]
        right = 0
        if self.keeps_draft_tokens:
            for token_id, draft_token in zip(token_ids, sequence.draft_tokens[:-1], strict=False):
                if token_id != draft_token:
                    break
                right += 1
        table, known = self._tables.page_ids(slot), sequence.known
        kept = self._pages.num_alike(table, known, known + right, sequence.draft_pages)
        self._pages.written(table, known, known + kept)
        sequence.draft_tokens = []
        sequence.append(token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        draft_tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        work = self._work(slots, limits)
        if work:
            ends = np.array([one.end + max(0, one.limit - 1) for one in work], np.int64)
            at = np.array([one.slot for one in work], np.int64)
            table = self._tables.rows(at, ends, self._cache.page_size)[:1]
            self._draft(work, table, draft_tokens)
        for slot, own in draft_tokens.items():
            sequence, table = self._sequences[slot], self._tables.page_ids(slot)
            sequence.draft_tokens, end = own, sequence.known + max(0, len(own) - 1)
            sequence.draft_pages = self._pages.of(table, sequence.known, end)
        return [draft_tokens[slot] for slot in slots]

    def _work(self, slots: Sequence[int], limits: Sequence[int]) -> list[_Work]:
        """List the computations that each slot has missed, as far as one step may do them."""
        work: list[_Work] = []
        written: set[int] = set()
        left = self._most_tokens
        for slot, limit in zip(slots, limits, strict=True):
            known, ids = self._sequences[slot].known, self._sequences[slot].ids
            most = min(limit, self._max_model_len - known + 1)
            last = known - self.lag
            # A step in flight may still compute for an answer that has ended.
            if most < 1 or last < 1 or int(ids[known - 1]) in self._end_ids:
                continue
            table = self._tables.page_ids(slot)
            start = self._pages.hole(table, last - 1)
            end = min(last, start + left)
            own = self._pages.of(table, start, end)
            # If several lack the same shared page, only one computes it.
            if start < end and written.isdisjoint(own):
                written.update(own)
                left -= end - start
                work.append(_Work(slot, start, end, most if end == last else 0))
        return work

    def _draft(
        self, work: Sequence[_Work], table: PageTable, draft_tokens: dict[int, list[int]]
    ) -> None:
        """Compute missed positions, and the first draft token of slots that then lack none. Then
        make one draft token after the other."""
        counts = np.array([one.end - one.start for one in work])
        lag = self.lag
        ids = [self._sequences[one.slot].ids[one.start + lag : one.end + lag] for one in work]
        going = [at for at, one in enumerate(work) if one.limit]
        rows = counts.cumsum()[going] - 1
        contexts = np.array([one.end for one in work])
        first = self._batch(counts, contexts, table, rows, np.concatenate(ids))
        passed = self._drawn(first, [work[at] for at in going], draft_tokens, None)
        for one in work:
            self._pages.written(self._tables.page_ids(one.slot), one.start, one.end)
        batch: HostBatch | None = None
        for made in range(1, max(one.limit for one in work)):
            able = [
                row
                for row, at in enumerate(going)
                if work[at].limit > made and self._goes_on(draft_tokens[work[at].slot], made)
            ]
            if not able:
                return
            if len(able) < len(going):
                going, passed = [going[row] for row in able], self._picked(passed, able)
                batch = None
            last_ids = np.array([draft_tokens[work[at].slot][-1] for at in going])
            if batch is None:
                batch = self._batch(
                    np.ones(len(going), np.int64),
                    np.array([work[at].end + made for at in going]),
                    np.ascontiguousarray(table[:, going]),
                    np.arange(len(going)),
                    last_ids,
                )
            else:  # updated in place: a new layout costs as much as a small model's draft token
                batch.advance(self._cache.page_size)
                batch.token_ids[:] = last_ids
            passed = self._drawn(batch, [work[at] for at in going], draft_tokens, passed)

    def _goes_on(self, draft_tokens: Sequence[int], made: int) -> bool:
        return len(draft_tokens) == made and draft_tokens[-1] not in self._end_ids

    def _batch(
        self,
        counts: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        table: PageTable,
        rows: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    ) -> HostBatch:
        size = self._cache.page_size
        batch = HostBatch.laid_out(counts, contexts, table, size, logit_rows=rows)
        batch.token_ids[:] = token_ids
        return batch

    def _drawn(
        self,
        host: HostBatch,
        drawn_for: Sequence[_Work],
        draft_tokens: dict[int, list[int]],
        passed: Passed | None,
    ) -> Passed | None:
        """Compute a batch with a row of logits for each of `drawn_for`; return the state to pass
        on.

        Each slot gets one more draft token, unless nothing can be drawn from its logits.
        """
        samples = None
        if drawn_for:
            slots = [one.slot for one in drawn_for]
            positions = [one.end + self.lag + len(draft_tokens[one.slot]) for one in drawn_for]
            samples = self._samples(slots, positions)
        drawn, passed = self._compute(host, samples, passed)
        if drawn is not None:
            for row, token_id in enumerate(drawn.token_ids.tolist()):
                if row not in drawn.row_errors:
                    draft_tokens[drawn_for[row].slot].append(token_id)
        return passed
