"""Waits until an engine has nothing left to do."""

from __future__ import annotations

import asyncio

from aioserve import Engine
from aioserve.testing import check_invariants

__all__ = ["all_given_back"]


async def all_given_back(engine: Engine, within_steps: int = 3) -> bool:
    """Return True if all requests give their pages back within `within_steps` steps.

    Raises if counts are inconsistent.
    """
    before = engine.stats().steps_total
    while (stats := engine.stats()).pages_held_by_requests or stats.pages_fenced:
        if stats.steps_total > before + within_steps:
            return False
        await asyncio.sleep(0.001)
    check_invariants(engine)
    return stats.num_running == stats.num_waiting == 0
