"""Keeps the collector of garbage off what a started engine has, in a process of the command's own.

A library must leave that to its host: the collector is the whole process's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """While entered, the collector doesn't look at what is there now, torch above all: a pass over
    that takes a tenth of a second and more, in which the event loop stands still."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
