"""Draft tokens by Medusa's heads, each for another position, from one hidden state.

target      state of e, from which it drew f
heads       state of e  ->  g, h, i             all at once, and none knows the others'

A chain of them is therefore soon wrong. If branches are verified, each is another candidate of the
first head. These bring more than the last heads do, and more than tokens that follow a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve.drafting.drafter import DraftedSequence
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter, DraftOptions
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.models.decoder import Decoder
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.paging.pages import token_location
from aioserve.steps.plan import StepPlan

__all__ = ["DraftMedusa"]


class DraftMedusa(ComputedDrafter):
    """Draft tokens of heads for `target`, whose steps keep the output of its last layer."""

    def __init__(
        self,
        heads: MedusaHeads,
        target: Decoder,
        states: StatePages,
        options: DraftOptions,
    ) -> None:
        super().__init__(target.backend, options)
        self._heads = heads
        self._target = target
        self._states = states
        self._max_sequences = options.max_sequences
        self._max_draft_tokens = options.max_draft_tokens
        self._max_branches = options.max_branches
        self._chain_alone: set[int] = set()
        """Slots whose requests ask for more than draws. Their branches aren't verified."""
        self._others: dict[int, list[int]] = {}
        """Further candidates of the first head in the current step, by slot."""
        self._known: dict[int, int] = {}
        """Number of known tokens of each slot."""
        self._last: dict[int, int] = {}
        """Last known token of each slot."""

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "head": self._heads.kind,
            "dtype": str(self._heads.dtype).removeprefix("torch."),
            **self._states.facts,
        }

    @property
    def states(self) -> StatePages:
        return self._states

    def rehearse(self) -> None:
        most = min(self._heads.count, self._max_draft_tokens)
        self._states.clear(0)
        states = self._states.at(np.zeros(self._max_sequences, np.int64))
        for greedy in (True, False):
            logits = self._heads.logits(self._target.normed(states), most).flatten(0, 1)
            self._draw(logits, self._any_samples(len(logits), greedy=greedy))

    def take(self, plan: StepPlan) -> None:
        super().take(plan)
        for start in plan.started_slots:
            params = start.params
            if params.edits_logits or params.is_guided or params.logprobs is not None:
                self._chain_alone.add(start.slot)
            else:
                self._chain_alone.discard(start.slot)

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._states.copy(plan.copies)

    @property
    def _kept_states(self) -> torch.Tensor:
        return self._target.kept_states

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._known[slot] = len(sequence.known_ids)
        self._last[slot] = int(sequence.known_ids[-1])

    def end(self, slot: int) -> None:
        del self._known[slot], self._last[slot]
        self._others.pop(slot, None)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for slot, ids in zip(slots, token_ids, strict=True):
            self._known[slot] += len(ids)
            self._last[slot] = ids[-1]

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        draft_tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        self._others = {}
        branches = {s: self._branches(s, limit) for s, limit in zip(slots, limits, strict=True)}
        limit_of = {s: limit - 2 * branches[s] for s, limit in zip(slots, limits, strict=True)}
        able = [s for s in slots if self._known[s] > 1 and self._last[s] not in self._end_ids]
        if not able:
            return [[] for _ in slots]
        states = self._states.at(np.array([self._location(slot) for slot in able], np.int64))
        most = min(self._heads.count, max(limit_of.values()))
        logits = self._heads.logits(self._target.normed(states), most).flatten(0, 1)
        samples = self._samples(
            able * most, [self._known[slot] + head for head in range(most) for slot in able]
        )
        drawn = self._draw(logits, samples)
        for row, token_id in enumerate(drawn.token_ids.tolist()):
            head, at = divmod(row, len(able))
            own = draft_tokens[able[at]]
            goes_on = len(own) == head and (not own or own[-1] not in self._end_ids)
            if goes_on and head < limit_of[able[at]] and row not in drawn.row_errors:
                own.append(token_id)
        self._others = {slot: [] for slot in able if branches[slot] and draft_tokens[slot]}
        if self._others:
            self._draft_branches(able, logits[: len(able)], branches, draft_tokens)
        return [draft_tokens[slot] for slot in slots]

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        return [[token_id] for token_id in self._others.get(slot, ())[: limit // 2]]

    def _branches(self, slot: int, limit: int) -> int:
        """Return the number of branches, of two rows each, that fit beside a chain of at least
        two tokens."""
        if slot in self._chain_alone:
            return 0
        return min(self._max_branches, max(0, limit - 2) // 2)

    def _draft_branches(
        self,
        able: Sequence[int],
        logits: Tensor,
        branches: Mapping[int, int],
        draft_tokens: Mapping[int, Sequence[int]],
    ) -> None:
        """Draw further candidates from the first head's logits, float32 `[able, V]`, without
        replacement."""
        logits = logits.clone()
        rows = [row for row, slot in enumerate(able) if slot in self._others]
        drawn = [draft_tokens[able[row]][0] for row in rows]
        while rows:
            logits[rows, drawn] = -torch.inf
            slots = [able[row] for row in rows]
            samples = self._samples(slots, [self._known[slot] for slot in slots])
            found = self._backend.draw(logits[rows], samples, self._last_tokens)
            drawn = found.token_ids.tolist()
            left: list[int] = []
            for place, slot in enumerate(slots):
                if place in found.row_errors:
                    continue
                self._others[slot].append(drawn[place])
                if len(self._others[slot]) < branches[slot]:
                    left.append(place)
            rows, drawn = [rows[place] for place in left], [drawn[place] for place in left]

    def _location(self, slot: int) -> int:
        """Location of the token whose state the last known token was drawn from."""
        table, size = self._tables.page_ids(slot), self._states.page_size
        return token_location(table, self._known[slot] - 2, size)
