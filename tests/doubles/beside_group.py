"""A third kind of group: pages for all positions, beside those of group 0.

Keys of a second attention, or scales of quantised pages, would be kept like this. The package
doesn't know it: a test adds it to `KINDS` of `aioserve.kv.groups.making` while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from aioserve.kv.groups.base import GroupClaim
from aioserve.kv.groups.window import WindowGroup
from aioserve.kv.lease import KVLease, SwappedRun
from aioserve.kv.page_table import NO_PAGES
from aioserve.kv.prefix_tree import Match
from aioserve.kv.tiers.tier import Tier
from aioserve.paging.layout import ONE_GROUP, GroupSpec
from aioserve.paging.pages import pages_for

__all__ = ["BesideGroup", "beside_specs"]

ALL = 1 << 40
"""Window in tokens: more than a sequence ever has."""


class BesideGroup(WindowGroup):
    """A group whose window no sequence outgrows, with two differences. A prompt has its pages from
    the beginning, and a claim relies on those in the tree."""

    keeps_all = True
    grows_with_chunks = False

    def __init__(self, tiers: Sequence[Tier], spec: GroupSpec) -> None:
        super().__init__(tiers, GroupSpec(spec.kind, spec.width, ALL))

    def match(
        self, match: Match, num_cached: int, num_known: int, swapped: SwappedRun | None
    ) -> GroupClaim:
        found = [self.pages_of(tier, page_ids) for tier, page_ids in enumerate(match.tiers)]
        tail = NO_PAGES
        if match.tail_tokens:
            tail = self.pages_of(0, np.array([match.tail_page], np.int32))
        for pool, page_ids in zip(self._pools, found, strict=True):
            pool.retain(page_ids)
        self._pool.retain(tail)
        count = pages_for(num_known, self.page_size) * self.width - len(found[0])
        return GroupClaim(0, tuple(found), tail, count, count)

    def first_swapped(self, lease: KVLease, index: int) -> int:
        return lease.published


def beside_specs(width: int) -> tuple[GroupSpec, ...]:
    """Groups of a layout with `width` groups of layers of this kind."""
    return *ONE_GROUP, GroupSpec(cast(Any, "beside"), width)
