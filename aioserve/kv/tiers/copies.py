"""Copies of pages that must be made, in order, before the next plan computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.kv.prefix_tree import Evicted
from aioserve.kv.tiers.tier import Tier
from aioserve.steps.pages import PageCopy

__all__ = ["Copies"]

PageIds = npt.NDArray[np.int32]


class Copies:
    """Copies that no plan carries yet. Each is counted by its tiers."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._page_size = tiers[0].pool.page_size
        self.waiting: list[PageCopy] = []
        """Copies for the next plan, in order. The plan carries and clears them."""

    def within(self, tier: int, sources: PageIds, targets: PageIds, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of each page."""
        self._add(tier, sources, tier, targets, num_tokens)
        self._tiers[tier].num_copied += len(sources)

    def across(self, from_tier: int, sources: PageIds, to_tier: int, targets: PageIds) -> None:
        """Copy whole pages to another tier."""
        self._add(from_tier, sources, to_tier, targets, self._page_size)
        if from_tier < to_tier:
            self._tiers[to_tier].num_taken += len(sources)
        else:
            self._tiers[from_tier].num_returned += len(sources)

    def evicted(self, evicted: Evicted) -> None:
        """Copy evicted pages, each to the tier after its own."""
        tiers = evicted.tiers.tolist()
        pairs = zip(evicted.page_ids.tolist(), evicted.target_ids.tolist(), strict=True)
        self.waiting += [
            PageCopy(tier, source, tier + 1, target, self._page_size)
            for tier, (source, target) in zip(tiers, pairs, strict=True)
        ]
        for tier in set(tiers):
            self._tiers[tier + 1].num_taken += tiers.count(tier)

    def _add(
        self,
        from_tier: int,
        sources: PageIds,
        to_tier: int,
        targets: PageIds,
        num_tokens: int,
    ) -> None:
        self.waiting += [
            PageCopy(from_tier, source, to_tier, target, num_tokens)
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
