"""Counts of the pages of KV memory, by where they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioserve.kv.tiers.tier import HOST, Tier

__all__ = ["KVUsage", "usage_of"]


class KVUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts of all pages at one moment, by where they are.

    `pages_free + pages_fenced + pages_cached + pages_held_by_requests == pages_total`.
    """

    pages_total: int
    pages_free: int
    pages_fenced: int
    """Pages released. They are free as soon as the step in flight is done."""
    pages_cached: int
    """Pages that only the prefix tree holds. They are evicted when a request needs pages."""
    pages_held_by_requests: int
    """Pages held by requests or pinned by the policy. A page that several share counts once."""
    pages_host_total: int
    """Pages of the host pool (`num_host_pages`)."""
    pages_host_used: int
    """Pages of the host pool that hold evicted cached pages or swapped-out requests."""
    pages_copied_total: int
    """Pages copied on the device: shared ones before they are written, and parts of cached ones."""
    pages_swapped_out_total: int
    """Pages copied to the host pool."""
    pages_swapped_in_total: int
    """Pages copied back."""


def usage_of(tiers: Sequence[Tier], num_cached: int) -> KVUsage:
    """Count the tiers' pages. `num_cached` of the first tier can be evicted."""
    pool = tiers[0].pool
    host = [tier for tier in tiers if tier.name == HOST]
    return KVUsage(
        pages_total=pool.num_pages,
        pages_free=pool.num_free,
        pages_fenced=pool.num_fenced,
        pages_cached=num_cached,
        pages_held_by_requests=pool.num_held - num_cached,
        pages_host_total=sum([tier.pool.num_pages for tier in host]),
        pages_host_used=sum([tier.pool.num_held for tier in host]),
        pages_copied_total=tiers[0].num_copied,
        pages_swapped_out_total=sum([tier.num_taken for tier in host]),
        pages_swapped_in_total=sum([tier.num_returned for tier in host]),
    )
