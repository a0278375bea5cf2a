"""Base of drafters that compute a model of their own, on the step thread between two steps."""

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
    """Facts about the engine that these drafters need."""

    num_slots: int
    num_groups: int
    """Groups of the target's layers. Group 0 keeps all positions."""
    max_model_len: int
    """Longest context that is served, in tokens."""
    max_sequences: int
    """Most sequences that have draft tokens in a step."""
    max_draft_tokens: int
    """Most draft tokens of a sequence in a step."""
    most_tokens: int
    """Most tokens of a step's catch-up computation; at least `max_sequences`."""
    end_ids: Collection[int] = ()
    """Tokens that usually end an answer. Nothing is drafted after one."""
    max_branches: int = 0
    """Most verified paths beside the first one."""
    keeps_distributions: bool = False
    """True if `ComputedDrafter.distributions` is used. Takes 4 bytes for each draft token of a
    step and each token of the vocabulary."""


class ComputedDrafter(AtOnce):
    """A drafter that follows the steps of a target, like a `StepFollower`.

    Draft tokens are drawn by the parameters of the request, but from logits without its edits, like
    penalties. Not thread-safe.
    """

    def __init__(self, backend: Backend, options: DraftOptions) -> None:
        self._backend = backend
        self._keeps_distributions = options.keeps_distributions
        self._end_ids = frozenset(options.end_ids)
        self._distributions: dict[int, list[Tensor]] = {}
        """Distributions that draft tokens of the current step were drawn from, by slot."""
        self._tables = SlotPageTables(options.num_slots, options.num_groups)
        self._slots = SlotTable(options.num_slots)
        self._last_tokens = backend.allocate_slots(options.num_slots)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts for `Engine.dump()`."""
        return {}

    @property
    def states(self) -> StatePages | None:
        """Pages that hold the target's states for this drafter; None if it reads none.

        Steps write them, unless `computed` is called.
        """
        return None

    @abstractmethod
    def rehearse(self) -> None:
        """Compute the largest possible step, in the first page.

        Shows the memory that this takes, and compiles kernels. Call it while all pages are free.
        """

    def take(self, plan: StepPlan) -> None:
        """End and start slots, and change their page tables, as a plan says. Raises
        `InvariantError` for pages that leave a gap."""
        for slot in plan.ended_slots:
            self._slots.end(slot)
        for start in plan.started_slots:
            if start.drafting is not None:
                self._slots.start(start.slot, start.params, start.seed)
        self._tables.take(plan)

    def follow(self, plan: StepPlan) -> None:
        """Prepare for a plan that the target is about to compute.

        Call it after `take`, and before the draft tokens of the plan are made. Raises
        `InvariantError` for a slot with dropped entries: drafts find theirs by position.
        """
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
        """Take the results of a computed plan: see `StepFollower.computed`."""
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
        """States that the target kept of its last batch: see `Decoder.kept_states`. Needs
        `states`."""
        raise NotImplementedError

    def _locations(self, plan: StepPlan, page_size: int) -> npt.NDArray[np.int64]:
        """Locations of a plan's tokens in the pages of group 0, page * page_size + offset, int64
        `[T]`."""
        items = plan.items
        slots = np.array([item.slot for item in items], np.int64)
        ends = np.array([item.index_end for item in items], np.int64)
        rows = np.repeat(np.arange(len(items)), [item.count for item in items])
        indices = np.concatenate([np.arange(item.index, item.index_end) for item in items])
        table = self._tables.rows(slots, ends, page_size)[:1]
        return token_locations(table, rows, indices, page_size)[0]

    def distributions(self, slot: int) -> Sequence[Tensor]:
        """Return the distributions of a slot's draft tokens: see `SampledDrafts`. Greedy
        requests have none."""
        return self._distributions.get(slot, ())

    def _tells_of(self, samples: SampleRows) -> bool:
        """True if any of these rows will have distributions."""
        return self._keeps_distributions and bool((samples["temperature"] > 0).any())

    def _any_samples(self, count: int, *, greedy: bool) -> SampleRows:
        """Make sampling rows for a rehearsal."""
        slots, keys = np.arange(count) % len(self._last_tokens), np.zeros(count, np.uint64)
        values = {**REHEARSED, "temperature": 0.0} if greedy else REHEARSED
        return SampleRows.alike(values, slots, seeds=keys, positions=keys)

    def _draw(self, logits: Tensor, samples: SampleRows) -> Drawn:
        """Draw a draft token from each row of logits, float32 `[S, V]`, in the order of each
        slot's chain."""
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
        """Make sampling rows with the keys that the target will draw the same tokens by."""
        return self._slots.rows(slots, positions)
