"""Guesses of what has KV pages of its own.

    known to the draft      a b c d . . .
    known                   a b c d e f g          the last one is pending
    first batch             e f g          ->  h   what it missed, and the first guess
    second batch            h              ->  i
    verified                g h i          ->  h x
    known to the draft      a b c d e f g h .      a guess that was right needs no second look

All slots of a step are computed together, each until it has as many guesses as it may have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import DraftedSequence
from aioserve.execution.batch import largest_counts
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter, DraftOptions
from aioserve.execution.speculation.drafts.draft_pages import DraftPages
from aioserve.ops import Backend, Drawn, HostBatch, KVCache, SampleRows
from aioserve.paging.pages import pages_for
from aioserve.steps.plan import StepPlan

__all__ = ["PagedDrafter"]

PageTable = npt.NDArray[np.int32]
Passed = TypeVar("Passed")
"""What a batch passes on to the next one, which computes behind its guesses."""


@dataclass(slots=True)
class _Sequence:
    ids: npt.NDArray[np.int32]
    """int32 `[room]`, of which the first `known` are known."""
    known: int
    guesses: list[int] = field(default_factory=list[int])
    """Guesses made last, behind the known ids: the draft has written the KV of all but the last."""
    guess_pages: list[int] = field(default_factory=list[int])
    """Pages that this KV was written to, in order of position. The sequence may have others there
    by the time that it is known which guesses were right."""

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.known + len(token_ids)
        if end > len(self.ids):
            self.ids = np.concatenate((self.ids, np.empty(end, np.int32)))
        self.ids[self.known : end] = token_ids
        self.known = end


@dataclass(slots=True)
class _Work:
    """Positions `[start, end)` of a slot to compute. Where they go on to the last known token,
    `limit` guesses are made behind it; elsewhere it is 0."""

    slot: int
    start: int
    end: int
    limit: int


class PagedDrafter(ComputedDrafter, Generic[Passed]):
    """Its KV pages, `cache`, have the numbers of the target's pages of group 0. `max_model_len`:
    longest context.

    A draft that has missed much, such as a long prompt, catches up over several steps, and makes no
    guesses for the slot before.
    """

    lag: int = 0
    """How far behind a token's own position the draft takes it in: one that reads what the target
    made of a token takes in the next one with it."""
    keeps_guesses: bool = True
    """Whether what was written for a guess is as good as for the same token when it is known."""

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
        """Compute a batch, which has a row of logits for each of `samples`: what was drawn from
        these, and what it passes on, of which rows that go on are picked. None: nothing is to be
        drawn. `passed`: what the batch before passed on, where this goes on behind its guesses."""

    def _picked(self, passed: Passed | None, rows: Sequence[int]) -> Passed | None:
        """Some rows of what a batch passed on."""
        return None

    # -- what happens in the steps of the target

    def rehearse(self) -> None:
        rows, longest = self._max_sequences, self._max_model_len
        counts = largest_counts(self._most_tokens, rows, longest)
        passed = self._rehearse(counts, longest, None, greedy=False)
        self._rehearse(np.ones(rows, np.int64), longest, passed, greedy=True)
        # Where few have guesses, long contexts may take other kernels than short ones.
        for context in (longest, 1):
            self._rehearse(np.ones(1, np.int64), context, None, greedy=True)

    def _rehearse(
        self, counts: npt.NDArray[np.int64], context: int, passed: Passed | None, *, greedy: bool
    ) -> Passed | None:
        """Compute the last tokens of sequences of the same length, so many of each, and draw behind
        them. What is passed on."""
        rows = len(counts)
        table = np.zeros((1, rows, pages_for(context, self._cache.page_size)), np.int32)
        contexts, ids = np.full(rows, context), np.zeros(counts.sum(), np.int64)
        batch = self._batch(counts, contexts, table, counts.cumsum() - 1, ids)
        return self._compute(batch, self._any_samples(rows, greedy=greedy), passed)[1]

    def take(self, plan: StepPlan) -> None:
        for slot in plan.ended_slots:
            if (sequence := self._sequences.get(slot)) is not None:
                # On a device that runs ahead `end` comes later, when its pages are another's.
                sequence.guesses = []
        super().take(plan)

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._copy(plan)
        for item in plan.items:
            # Where guesses were wrong it begins before that, among what was overwritten for them.
            self._pages.overwritten(self._tables.page_ids(item.slot), item.start, item.end)

    def _copy(self, plan: StepPlan) -> None:
        within: list[tuple[int, int, int, int, int]] = []
        for copy in plan.copies:
            if copy.from_tier == copy.to_tier == 0:
                # The last of them may have been taken in with a token that isn't copied.
                alike = max(0, copy.num_tokens - self.lag)
                self._pages.copied(copy.source, copy.target, alike)
                within.append((0, copy.source, 0, copy.target, copy.num_tokens))
            elif copy.to_tier == 0:
                self._pages.copied(copy.target, copy.target, 0)
        if within:
            self._backend.copy_pages((self._cache,), np.array(within, np.int32))

    # -- as any drafter

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
        if self.keeps_guesses:
            for token_id, guess in zip(token_ids, sequence.guesses[:-1], strict=False):
                if token_id != guess:
                    break
                right += 1
        table, known = self._tables.page_ids(slot), sequence.known
        kept = self._pages.num_alike(table, known, known + right, sequence.guess_pages)
        self._pages.written(table, known, known + kept)
        sequence.guesses = []
        sequence.append(token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        guesses: dict[int, list[int]] = {slot: [] for slot in slots}
        work = self._work(slots, limits)
        if work:
            ends = np.array([one.end + max(0, one.limit - 1) for one in work], np.int64)
            at = np.array([one.slot for one in work], np.int64)
            table = self._tables.rows(at, ends, self._cache.page_size)[:1]
            self._guess(work, table, guesses)
        for slot, own in guesses.items():
            sequence, table = self._sequences[slot], self._tables.page_ids(slot)
            sequence.guesses, end = own, sequence.known + max(0, len(own) - 1)
            sequence.guess_pages = self._pages.of(table, sequence.known, end)
        return [guesses[slot] for slot in slots]

    def _work(self, slots: Sequence[int], limits: Sequence[int]) -> list[_Work]:
        """What each slot has missed, as far as one step may compute it."""
        work: list[_Work] = []
        written: set[int] = set()
        left = self._most_tokens
        for slot, limit in zip(slots, limits, strict=True):
            known, ids = self._sequences[slot].known, self._sequences[slot].ids
            most = min(limit, self._max_model_len - known + 1)
            last = known - self.lag
            # Of an answer that has ended a step may be computed all the same, which was in flight.
            if most < 1 or last < 1 or int(ids[known - 1]) in self._end_ids:
                continue
            table = self._tables.page_ids(slot)
            start = self._pages.hole(table, last - 1)
            end = min(last, start + left)
            own = self._pages.of(table, start, end)
            # Of those that miss the same of a page that they share, one computes it.
            if start < end and written.isdisjoint(own):
                written.update(own)
                left -= end - start
                work.append(_Work(slot, start, end, most if end == last else 0))
        return work

    def _guess(
        self, work: Sequence[_Work], table: PageTable, guesses: dict[int, list[int]]
    ) -> None:
        """Compute what was missed, with the first guess of slots that miss nothing more; then
        guess behind guess."""
        counts = np.array([one.end - one.start for one in work])
        lag = self.lag
        ids = [self._sequences[one.slot].ids[one.start + lag : one.end + lag] for one in work]
        going = [at for at, one in enumerate(work) if one.limit]
        rows = counts.cumsum()[going] - 1
        contexts = np.array([one.end for one in work])
        first = self._batch(counts, contexts, table, rows, np.concatenate(ids))
        passed = self._drawn(first, [work[at] for at in going], guesses, None)
        for one in work:
            self._pages.written(self._tables.page_ids(one.slot), one.start, one.end)
        batch: HostBatch | None = None
        for made in range(1, max(one.limit for one in work)):
            able = [
                row
                for row, at in enumerate(going)
                if work[at].limit > made and self._goes_on(guesses[work[at].slot], made)
            ]
            if not able:
                return
            if len(able) < len(going):
                going, passed = [going[row] for row in able], self._picked(passed, able)
                batch = None
            last_ids = np.array([guesses[work[at].slot][-1] for at in going])
            if batch is None:
                batch = self._batch(
                    np.ones(len(going), np.int64),
                    np.array([work[at].end + made for at in going]),
                    np.ascontiguousarray(table[:, going]),
                    np.arange(len(going)),
                    last_ids,
                )
            else:  # in place, as to lay out another takes as long as a small model's guess
                batch.advance(self._cache.page_size)
                batch.token_ids[:] = last_ids
            passed = self._drawn(batch, [work[at] for at in going], guesses, passed)

    def _goes_on(self, guesses: Sequence[int], made: int) -> bool:
        return len(guesses) == made and guesses[-1] not in self._end_ids

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
        guesses: dict[int, list[int]],
        passed: Passed | None,
    ) -> Passed | None:
        """A batch with a row of logits for each of `drawn_for`: one guess more for each of these,
        unless nothing can be drawn from its logits. What it passes on."""
        samples = None
        if drawn_for:
            slots = [one.slot for one in drawn_for]
            positions = [one.end + self.lag + len(guesses[one.slot]) for one in drawn_for]
            samples = self._samples(slots, positions)
        drawn, passed = self._compute(host, samples, passed)
        if drawn is not None:
            for row, token_id in enumerate(drawn.token_ids.tolist()):
                if row not in drawn.row_errors:
                    guesses[drawn_for[row].slot].append(token_id)
        return passed
