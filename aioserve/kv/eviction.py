"""Eviction strategies written in Python: what they see, and what keeps the tree safe from them."""

from __future__ import annotations

import logging
import math
from numbers import Real
from typing import Protocol, runtime_checkable

import msgspec

from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault

__all__ = ["Eviction", "EvictionStrategy", "PageUse", "StrategyCalls", "key_of"]

logger: logging.Logger = logging.getLogger(__name__)


class PageUse(msgspec.Struct, frozen=True, gc=False):
    """Use of a run of cached pages, in ticks of a clock that counts uses of the cache."""

    created_tick: int
    """Tick when the run began: what one sequence adds without a break is of one age."""
    last_used_tick: int
    hits: int
    """Requests that found the pages in the cache."""


@runtime_checkable
class EvictionStrategy(Protocol):
    """Says which cached pages are given up first.

    class LeastHits:
        def key(self, use):
            return use.hits
    """

    def key(self, use: PageUse) -> float:
        """A number, and not NaN: the smallest goes first, the least recently used of equal ones.

        It must depend on `use` alone. It is asked when a run of pages becomes evictable, on the
        event loop, and must be quick.
        """
        ...


def key_of(strategy: EvictionStrategy, use: PageUse) -> float:
    """The key as a float; raises `NotAnAnswer` if it is no number or NaN, and what `key` raises."""
    answer = strategy.key(use)
    # A string of digits would do for float().
    if isinstance(answer, Real) and not math.isnan(number := float(answer)):
        return number
    raise NotAnAnswer(answer, "not a number")


class StrategyCalls(PluginCalls):
    """Asks a strategy until its first fault. Without a key the tree evicts in the order of lru and
    asks no more."""

    def __init__(self, strategy: EvictionStrategy, name: str) -> None:
        self.strategy = strategy
        after = "least recently used decides from now on"
        super().__init__(f"eviction strategy {name}", after, logger)

    def __call__(self, created_tick: int, last_used_tick: int, hits: int) -> float | None:
        """The key; None if there is none."""
        try:
            return self.call(
                "key", key_of, self.strategy, PageUse(created_tick, last_used_tick, hits)
            )
        except PluginFault:
            return None
        except KeyboardInterrupt:  # the tree raises it when its operation is done
            self.fault("key", "was interrupted")
            raise


Eviction = str | EvictionStrategy | StrategyCalls
"""A name in `EVICTION_STRATEGIES`, or a strategy written in Python."""
