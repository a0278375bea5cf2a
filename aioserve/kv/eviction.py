"""Eviction strategies written in Python: what they see, and what keeps the tree safe from them."""

from __future__ import annotations

import logging
import math
import reprlib
from numbers import Real
from typing import Protocol

import msgspec

__all__ = ["Eviction", "EvictionStrategy", "GuardedStrategy", "PageUse"]

logger = logging.getLogger(__name__)


class PageUse(msgspec.Struct, frozen=True, gc=False):
    """How a run of cached pages was used, in ticks of a clock that counts uses of the cache."""

    created_tick: int
    """When the run began: what one sequence adds without a break is of one age."""
    last_used_tick: int
    hits: int
    """Requests that found the pages in the cache."""


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


class GuardedStrategy:
    """Asks a strategy until it raises or answers nonsense, which is logged once, by name."""

    __slots__ = ("__weakref__", "failed", "name", "strategy")

    def __init__(self, strategy: EvictionStrategy, name: str) -> None:
        self.strategy = strategy
        self.name = name
        self.failed = False

    def __call__(self, created_tick: int, last_used_tick: int, hits: int) -> float | None:
        """The key as a float; None for good once there was none."""
        try:
            answer = self.strategy.key(PageUse(created_tick, last_used_tick, hits))
            # A string of digits would do for float().
            if isinstance(answer, Real) and not math.isnan(number := float(answer)):
                return number
        except KeyboardInterrupt:
            self._fail("was interrupted")
            raise  # the tree passes it on when it is done
        except BaseException as error:
            self._fail(f"raised {reprlib.repr(error)}", error)
            return None
        self._fail(f"answered {reprlib.repr(answer)}, not a number")
        return None

    def _fail(self, what: str, error: BaseException | None = None) -> None:
        self.failed = True
        logger.error(
            "eviction strategy %s: key %s; least recently used decides from now on",
            self.name,
            what,
            exc_info=error,
        )


Eviction = str | EvictionStrategy | GuardedStrategy
"""A name in `EVICTION_STRATEGIES`, or a strategy written in Python."""
