"""Tier of pages, and the list of tiers that a memory has."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.kv.page_pool import PagePool

__all__ = ["DEVICE", "HOST", "Tier", "tiers_of"]

DEVICE = "device"
HOST = "host"
NAMES = (DEVICE, HOST)
"""Names of tiers, nearest first."""


class Tier:
    """Pages of one storage, and totals of the pages copied since it was made."""

    __slots__ = ("name", "num_copied", "num_returned", "num_taken", "pool")

    def __init__(self, name: str, pool: PagePool) -> None:
        self.name: str = name
        self.pool: PagePool = pool
        self.num_copied: int = 0
        """Pages copied within it: shared ones before a write, and parts of cached ones."""
        self.num_taken: int = 0
        """Pages copied to it from a nearer tier."""
        self.num_returned: int = 0
        """Pages copied from it to a nearer tier."""

    def __repr__(self) -> str:
        return f"Tier({self.name!r}, {self.pool!r})"


def tiers_of(
    num_pages: Sequence[int], page_size: int, num_group_pages: int = 0
) -> tuple[Tier, ...]:
    """Make tiers with new pools of `num_pages` pages each, nearest first. A tier without pages is
    left out.

    Raises `ValueError` for more tiers than `NAMES` has.
    """
    if len(num_pages) > len(NAMES):
        raise ValueError(f"num_pages must be of at most {len(NAMES)} tiers, got {list(num_pages)}")
    return tuple(
        [
            Tier(name, PagePool(count, page_size, num_group_pages))
            for tier, (name, count) in enumerate(zip(NAMES, num_pages, strict=False))
            if count or not tier
        ]
    )
