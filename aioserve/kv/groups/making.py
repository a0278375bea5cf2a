"""Groups of a layout: a class for each kind."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.kv.groups.base import Group
from aioserve.kv.groups.full import FullGroup
from aioserve.kv.groups.window import WindowGroup
from aioserve.kv.tiers.tier import Tier
from aioserve.paging.layout import GroupSpec

__all__ = ["groups_of"]

KINDS: dict[str, type[Group]] = {"full": FullGroup, "window": WindowGroup}


def groups_of(specs: Sequence[GroupSpec], tiers: Sequence[Tier]) -> tuple[Group, ...]:
    """Make groups by `specs`, with pages in `tiers`. Raises `ValueError` for pools whose number of
    group pages differs from what the groups after the first take."""
    num_group_pages = sum([spec.width for spec in specs[1:]])
    for tier in tiers:
        if tier.pool.num_group_pages != num_group_pages:
            raise ValueError(
                f"pools must have {num_group_pages} group pages for groups {list(specs)}, "
                f"got {tier.pool.num_group_pages} in tier {tier.name}"
            )
    return tuple([KINDS[spec.kind](tiers, spec) for spec in specs])
