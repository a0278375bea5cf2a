"""Eviction strategies written in Python: what they see, and what protects the tree from them."""

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
    """Tick when the run began. Pages that one sequence adds without a break have one age."""
    last_used_tick: int
    hits: int
    """Requests that found the pages in the cache."""


@runtime_checkable
class EvictionStrategy(Protocol):
    """Decides which cached pages are given up first.

    class LeastHits:
        def key(self, use):
            return use.hits
    """

    def key(self, use: PageUse) -> float:
        """Return a number that isn't NaN: the smallest goes first, and among equal ones the least
        recently used.

        It must depend on `use` alone. It is asked when a run of pages becomes evictable, on the
        event loop, and must be quick.
        """
        ...


def key_of(strategy: EvictionStrategy, use: PageUse) -> float:
    """Return the key as a float. Raises `NotAnAnswer` unless it is a number other than NaN, and
    anything that `key` raises."""
    answer = strategy.key(use)
    # float() alone would accept a string of digits.
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
        """Return the key; None after a fault."""
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
"""Name in `EVICTION_STRATEGIES`, or a strategy written in Python."""
