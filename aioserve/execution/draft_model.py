"""Guesses by a draft model: it computes on the thread of the steps, between two of them.

    known to the draft      a b c d . . .
    known                   a b c d e f g          the last one is pending
    first batch             e f g          ->  h   what it missed, and the first guess
    second batch            h              ->  i
    verified                g h i          ->  h x
    known to the draft      a b c d e f g h .      a guess that was right needs no second look

All slots of a step are computed together, each until it has as many guesses as it may have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.execution.draft_pages import DraftPages
from aioserve.models.decoder import Decoder
from aioserve.ops import HostBatch, KVCache, SampleRows
from aioserve.sampling.sampler import SlotTable
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import CopyKind
from aioserve.steps.plan import StepPlan

__all__ = ["DraftModel"]

PageTable = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Sequence:
    ids: npt.NDArray[np.int32]
    """int32 `[room]`, of which the first `known` are known."""
    known: int
    guesses: list[int] = field(default_factory=list[int])
    """Guesses made last, behind the known ids: the draft has written the KV of all but the last."""

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


class DraftModel(Drafter):
    """Guesses of a decoder whose KV pages have the numbers of the target's pages of group 0, which
    keep all positions. `num_groups`: groups of the target. Nothing is guessed behind a guess of
    `end_ids`, which mostly ends an answer.

    A draft that has missed much, such as a long prompt, catches up over several steps: it computes
    at most `most_tokens` of what it missed in one, and makes no guesses for the slot before.
    Guesses are drawn by the parameters of the request, but from logits without its edits, such as
    penalties. Not thread-safe.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        num_slots: int,
        num_groups: int,
        most_tokens: int,
        end_ids: Collection[int] = (),
        keeps_distributions: bool = False,
    ) -> None:
        """`keeps_distributions`: `distributions` is asked for. It takes 4 bytes for each token of
        the vocabulary for each guess of a step."""
        self._model = model
        self._cache = cache
        self._most_tokens = most_tokens
        self._end_ids = frozenset(end_ids)
        self._pages = DraftPages(cache.num_pages, cache.page_size)
        self._tables = SlotPageTables(num_slots, num_groups)
        self._slots = SlotTable(num_slots)
        self._last_tokens = model.backend.allocate_slots(num_slots)
        self._sequences: dict[int, _Sequence] = {}
        self._keeps_distributions = keeps_distributions
        self._distributions: dict[int, list[Tensor]] = {}
        """Probabilities that guesses of the current step were drawn by, by slot."""

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """As `DrawnGuesses.distributions`: a greedy request has none."""
        return self._distributions.get(slot, ())

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for `Engine.dump()`."""
        model = self._model
        return {
            "architecture": model.config.architecture,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weight_bytes": model.weight_memory.by_format(),
            "kv_cache_bytes": self._cache.storage.nbytes,
        }

    # -- what happens in the steps of the target

    def take(self, plan: StepPlan) -> None:
        """Slots end and start, and their page tables change, as a plan says. Raises
        `InvariantError` for pages that leave a gap."""
        for slot in plan.ended_slots:
            self._slots.end(slot)
        for start in plan.started_slots:
            if start.drafting is not None:
                self._slots.start(start.slot, start.params, start.seed)
        self._tables.take(plan)

    def follow(self, plan: StepPlan) -> None:
        """The target is about to compute a plan, whose pages it has copied. To be called behind
        `take`, and before the guesses of the plan are made."""
        self._distributions.clear()
        self._copy(plan)
        for item in plan.items:
            # Where guesses were wrong it begins before that, among what was overwritten for them.
            self._pages.overwritten(self._tables.page_ids(item.slot), item.start, item.end)

    def _copy(self, plan: StepPlan) -> None:
        within: list[tuple[int, int, int, int, int]] = []
        for copy in plan.copies:
            if copy.kind is CopyKind.DEVICE:
                self._pages.copied(copy.source, copy.target, copy.num_tokens)
                within.append((0, copy.source, 0, copy.target, copy.num_tokens))
            elif copy.kind is CopyKind.FROM_HOST:
                self._pages.copied(copy.target, copy.target, 0)
        if within:
            self._model.backend.copy_pages((self._cache,), np.array(within, np.int32))

    # -- as any drafter

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._sequences[slot] = _Sequence(sequence.known_ids.copy(), len(sequence.known_ids))

    def end(self, slot: int) -> None:
        del self._sequences[slot]

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        sequence = self._sequences[slot]
        right = 0
        for token_id, guess in zip(token_ids, sequence.guesses[:-1], strict=False):
            if token_id != guess:
                break
            right += 1
        table, known = self._tables.page_ids(slot), sequence.known
        self._pages.written(table, known, known + right)
        sequence.guesses = []
        sequence.append(token_ids)

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        return self.draft_all((slot,), (limit,))[0]

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        guesses: dict[int, list[int]] = {slot: [] for slot in slots}
        work = self._work(slots, limits)
        if work:
            ends = np.array([one.end + max(0, one.limit - 1) for one in work], np.int64)
            at = np.array([one.slot for one in work], np.int64)
            table = self._tables.rows(at, ends, self._cache.page_size)[:1]
            self._catch_up(work, table, guesses)
            self._go_on(work, table, guesses)
        for slot, own in guesses.items():
            self._sequences[slot].guesses = own
        return [guesses[slot] for slot in slots]

    def _work(self, slots: Sequence[int], limits: Sequence[int]) -> list[_Work]:
        """What each slot has missed, as far as one step may compute it."""
        work: list[_Work] = []
        left = self._most_tokens
        for slot, limit in zip(slots, limits, strict=True):
            known = self._sequences[slot].known
            most = min(limit, self._model.max_model_len - known + 1)
            start = self._pages.hole(self._tables.page_ids(slot), known - 1)
            end = min(known, start + left)
            if most > 0 and start < end:
                left -= end - start
                work.append(_Work(slot, start, end, most if end == known else 0))
        return work

    def _catch_up(
        self, work: Sequence[_Work], table: PageTable, guesses: dict[int, list[int]]
    ) -> None:
        """Compute what was missed, with the first guess of slots that miss nothing more."""
        counts = np.array([one.end - one.start for one in work])
        ids = [self._sequences[one.slot].ids[one.start : one.end] for one in work]
        ready = [one for one in work if one.limit]
        rows = [int(end) - 1 for one, end in zip(work, counts.cumsum(), strict=True) if one.limit]
        contexts = np.array([one.end for one in work])
        batch = self._batch(counts, contexts, table, rows, np.concatenate(ids))
        self._compute(batch, ready, guesses)
        for one in work:
            self._pages.written(self._tables.page_ids(one.slot), one.start, one.end)

    def _go_on(
        self, work: Sequence[_Work], table: PageTable, guesses: dict[int, list[int]]
    ) -> None:
        """Compute guess behind guess."""
        for made in range(1, max(one.limit for one in work)):
            able = [
                at
                for at, one in enumerate(work)
                if one.limit > made
                and len(guesses[one.slot]) == made
                and guesses[one.slot][-1] not in self._end_ids
            ]
            if not able:
                return
            going = [work[at] for at in able]
            batch = self._batch(
                np.ones(len(going), np.int64),
                np.array([one.end + made for one in going]),
                np.ascontiguousarray(table[:, able]),
                range(len(going)),
                np.array([guesses[one.slot][-1] for one in going]),
            )
            self._compute(batch, going, guesses)

    def _batch(
        self,
        counts: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        table: PageTable,
        rows: Sequence[int],
        token_ids: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    ) -> HostBatch:
        size = self._cache.page_size
        batch = HostBatch.laid_out(counts, contexts, table, size, logit_rows=rows)
        batch.token_ids[:] = token_ids
        return batch

    def _compute(
        self, host: HostBatch, drawn_for: Sequence[_Work], guesses: dict[int, list[int]]
    ) -> None:
        """A batch with a row of logits for each of `drawn_for`: one guess more for each of these,
        unless nothing can be drawn from its logits."""
        batch = self._model.backend.prepare(host, self._cache, self._last_tokens)
        if not drawn_for:
            self._model.forward(batch, self._cache)
            return
        samples = self._samples(drawn_for, guesses)
        by_row: dict[int, Tensor] = {}
        if self._keeps_distributions and (samples.temperatures > 0).any():
            logits = self._model.forward(batch, self._cache)
            drawn = self._model.backend.draw(logits, samples, self._last_tokens)
            by_row = self._drawn_by(logits, samples)
        else:
            drawn = self._model.draw(batch, self._cache, samples, self._last_tokens)
        for row, token_id in enumerate(drawn.token_ids.tolist()):
            if row not in drawn.row_errors:
                slot = drawn_for[row].slot
                guesses[slot].append(token_id)
                if row in by_row:
                    self._distributions.setdefault(slot, []).append(by_row[row])

    def _drawn_by(self, logits: Tensor, samples: SampleRows) -> dict[int, Tensor]:
        """Probabilities of each row that isn't greedy, by index."""
        sampled = samples.temperatures > 0
        rows = samples.repeated(sampled.astype(int).tolist(), samples.positions[sampled])
        at = np.flatnonzero(sampled).tolist()
        return dict(zip(at, self._model.backend.probabilities(logits[at], rows), strict=True))

    def _samples(self, drawn_for: Sequence[_Work], guesses: dict[int, list[int]]) -> SampleRows:
        """The keys are those by which the target draws the tokens that are guessed."""
        slots = [one.slot for one in drawn_for]
        return self._slots.rows(slots, [one.end + len(guesses[one.slot]) for one in drawn_for])
