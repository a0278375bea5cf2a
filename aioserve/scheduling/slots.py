"""Slots: places in the runner's state, one per running sequence.

Plans tell the runner which slots start and end. An ended slot stays fenced until its last step is
done.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import DraftedSequence
from aioserve.kv.lease import KVLease
from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import rows_of
from aioserve.request import Request
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import SlotStart, StepPlan

__all__ = ["SlotPool"]


class SlotPool:
    """Hands out slots `0..num_slots-1`. A released slot is free once its last step is done.

    No other sequence gets a slot while a step in flight names it. A row that comes back for a
    sequence's slot therefore belongs to that sequence. It may still belong to an earlier run
    (`aioserve.scheduling.sequence.Run`): the sequence went back to a token whose mask came late.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._fenced: list[tuple[int, int]] = []
        self._done = NO_STEP
        self.started: dict[int, SlotStart] = {}
        """Slots started since the last plan. The next plan carries these, `ended` and `pages`."""
        self.ended: list[int] = []
        self.pages: list[SlotPages] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Slots that belong to a sequence now."""
        return self.num_slots - len(self._free) - len(self._fenced)

    def acquire(self, request: Request, seed: int, known_ids: npt.NDArray[np.int32]) -> int:
        """Start a slot for a sequence of `request` that samples with `seed`. `known_ids` is int32
        `[known tokens]` and must never change."""
        slot, params = self._free.pop(), request.params
        self.started[slot] = SlotStart(
            slot=slot,
            params=params,
            seed=seed,
            prompt_tokens=request.num_before_answer,
            edits_logprobs=request.edits_logprobs,
            known_ids=known_ids if params.needs_history else None,
            end_ids=request.end_ids,
            bad_word_ids=request.bad_word_ids,
            logits_processors=request.logits_processors,
            drafting=_drafting(request, known_ids) if request.max_draft_tokens else None,
            script=request.script,
        )
        return slot

    def release(self, slot: int, last_step: int) -> None:
        """End a slot. Step `last_step` is the last to name it."""
        if self.started.pop(slot, None) is None:  # no runner has heard of it
            self.ended.append(slot)
        if self.pages:
            self.pages = [change for change in self.pages if change.slot != slot]
        if last_step <= self._done:
            self._free.append(slot)
        else:
            self._fenced.append((last_step, slot))

    def carry(self, slot: int, lease: KVLease) -> None:
        """Add the pages of a slot's lease that no plan has carried yet to the next plan."""
        first, added = lease.carried, lease.page_table.page_ids[lease.carried :]
        if len(lease.tables) > 1:
            added = rows_of(lease.tables, first, lease.covered)
        self.pages.append(SlotPages(slot, first, added))
        lease.carried = lease.covered

    def clear_changes(self) -> None:
        """Clear `started`, `ended` and `pages`: a plan carries them now."""
        self.ended, self.started, self.pages = [], {}, []

    def repeat_changes(self, plan: StepPlan) -> None:
        """Let the next plan carry these changes again: no runner heard of `plan`."""
        self.ended[:0] = plan.ended_slots
        self.started = {start.slot: start for start in plan.started_slots} | self.started
        self.pages[:0] = plan.pages

    def complete(self, step: int) -> None:
        """Record that step number `step` and all before it are done."""
        self._done = step
        if not self._fenced:
            return
        self._free += [slot for last_step, slot in self._fenced if last_step <= step]
        self._fenced = [entry for entry in self._fenced if entry[0] > step]

    def recover(self, held: Iterable[int], last_step: int) -> None:
        """Take back every slot that is neither held, free nor fenced. `held` lists the slots of
        sequences. Step `last_step` may be the last to name a lost one."""
        known = {*held, *self._free, *(slot for _, slot in self._fenced)}
        for slot in set(range(self.num_slots)) - known:
            self.release(slot, last_step)


def _drafting(request: Request, known_ids: npt.NDArray[np.int32]) -> DraftedSequence:
    return DraftedSequence(
        known_ids=known_ids,
        prompt_tokens=request.num_before_answer,
        namespace=request.namespace,
        predicted_ids=request.predicted_ids,
    )
