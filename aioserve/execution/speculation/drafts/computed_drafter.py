"""What drafters have in common that compute a model of their own on the thread of the steps,
between two of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.drafting.at_once import AtOnce
from aioserve.errors import InvariantError
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.ops import Backend, Drawn, SampleRows
from aioserve.paging.pages import token_locations
from aioserve.sampling.sampler import SlotTable
from aioserve.sampling_params import REHEARSED
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.plan import StepPlan

__all__ = ["ComputedDrafter", "DraftOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What all of them are told of the engine."""

    num_slots: int
    num_groups: int
    """Groups of the target's layers, of which group 0 keeps all positions."""
    max_model_len: int
    """Longest context that is served, in tokens."""
    max_sequences: int
    """Most sequences that have guesses in a step."""
    max_guesses: int
    """Most guesses of a sequence in a step."""
    most_tokens: int
    """Most tokens that a step computes of what a draft has missed; at least `max_sequences`."""
    end_ids: Collection[int] = ()
    """Tokens that mostly end an answer: behind a guess of one nothing is guessed."""
    max_branches: int = 0
    """Most paths beside its first one that are verified."""
    keeps_distributions: bool = False
    """Whether `ComputedDrafter.distributions` is asked for. It takes 4 bytes for each token of the
    vocabulary for each guess of a step."""


class ComputedDrafter(AtOnce):
    """A drafter that follows the steps of a target, as `StepFollower` has it.

    Guesses are drawn by the parameters of the request, but from logits without its edits, such as
    penalties. Not thread-safe.
    """

    def __init__(self, backend: Backend, options: DraftOptions) -> None:
        self._backend = backend
        self._keeps_distributions = options.keeps_distributions
        self._end_ids = frozenset(options.end_ids)
        self._distributions: dict[int, list[Tensor]] = {}
        """Probabilities that guesses of the current step were drawn by, by slot."""
        self._tables = SlotPageTables(options.num_slots, options.num_groups)
        self._slots = SlotTable(options.num_slots)
        self._last_tokens = backend.allocate_slots(options.num_slots)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts for `Engine.dump()`."""
        return {}

    @property
    def states(self) -> StatePages | None:
        """Where the target's steps leave what is read of them: who doesn't call `computed` has the
        steps put it there. None: nothing is read."""
        return None

    @abstractmethod
    def rehearse(self) -> None:
        """Compute as much as there may be in a step, of anything, in the first page: whoever counts
        memory sees how much this takes, and kernels are compiled. To be called while all pages are
        free."""

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
        """The target is about to compute a plan; it copies pages first. To be called behind `take`,
        and before the draft tokens of the plan are made. Raises `InvariantError` for a slot
        whose entries were dropped: drafts find what they read and write by position."""
        for item in plan.items:
            if item.index != item.start:
                raise InvariantError(
                    f"slot {item.slot} goes on from position {item.start} at index {item.index}, "
                    "and its drafts are at their positions"
                )
        self._distributions.clear()

    def computed(
        self,
        plan: StepPlan,
        rows: npt.NDArray[np.int64] | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """As `StepFollower.computed`."""
        if (pages := self.states) is None:
            return
        kept = self._kept_states
        if rows is not None:
            kept = kept[torch.from_numpy(rows)]
        if locations is None:
            locations = self._locations(plan, pages.page_size)
        pages.put(locations, kept)

    @property
    def _kept_states(self) -> Tensor:
        """What the target has kept of the batch that it computed last, as `Decoder.kept_states`;
        where `states` are."""
        raise NotImplementedError

    def _locations(self, plan: StepPlan, page_size: int) -> npt.NDArray[np.int64]:
        """Where the tokens of a plan are in the pages of group 0: page * page_size + offset, int64
        `[T]`."""
        items = plan.items
        slots = np.array([item.slot for item in items], np.int64)
        ends = np.array([item.index_end for item in items], np.int64)
        rows = np.repeat(np.arange(len(items)), [item.count for item in items])
        indices = np.concatenate([np.arange(item.index, item.index_end) for item in items])
        table = self._tables.rows(slots, ends, page_size)[:1]
        return token_locations(table, rows, indices, page_size)[0]

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """As `SampledDrafts.distributions`: a greedy request has none."""
        return self._distributions.get(slot, ())

    def _tells_of(self, samples: SampleRows) -> bool:
        """Whether `distributions` has some of these rows."""
        return self._keeps_distributions and bool((samples["temperature"] > 0).any())

    def _any_samples(self, count: int, *, greedy: bool) -> SampleRows:
        """Rows to rehearse with."""
        slots, keys = np.arange(count) % len(self._last_tokens), np.zeros(count, np.uint64)
        values = {**REHEARSED, "temperature": 0.0} if greedy else REHEARSED
        return SampleRows.alike(values, slots, seeds=keys, positions=keys)

    def _draw(self, logits: Tensor, samples: SampleRows) -> Drawn:
        """Draw a guess from each row of logits, float32 `[S, V]`, in the order of the guesses of
        each slot."""
        drawn = self._backend.draw(logits, samples, self._last_tokens)
        if self._tells_of(samples):
            sampled = samples["temperature"] > 0
            rows = samples.repeated(sampled.astype(int).tolist(), samples.positions[sampled])
            at = np.flatnonzero(sampled).tolist()
            found = self._backend.probabilities(logits[at], rows)
            for row, slot, one in zip(at, rows.slots.tolist(), found, strict=True):
                if row not in drawn.row_errors:
                    self._distributions.setdefault(slot, []).append(one)
        return drawn

    def _samples(self, slots: Sequence[int], positions: Sequence[int]) -> SampleRows:
        """The keys are those by which the target draws the tokens that are guessed."""
        return self._slots.rows(slots, positions)
