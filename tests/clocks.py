"""Clocks that go wrong. A test must pass under each of them. They stand for slower and faster
machines, and for machines with other work now and again.

`AIOSERVE_CLOCK=fast` makes the clocks of a test process run five times faster, and `slow` five
times slower. `jumps` lets them nearly stand still for a while and then leap. Processor time stays
as it is, and so do programs that a test starts anew. Tests marked `more` and `alone` may watch the
clock, so they are left out. Tests marked `clock` run without watching it (`make test-clocks`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CLOCKS", "CREEP", "JUMP_SECONDS", "RATE", "distort"]

RATE = 5
JUMP_SECONDS = 0.4
JUMP_NS = int(JUMP_SECONDS * 1e9)
CREEP = 100
"""Factor by which a clock is slower between two jumps."""

CLOCKS: dict[str, Callable[[int], int]] = {
    "fast": lambda passed: passed * RATE,
    "slow": lambda passed: passed // RATE,
    "jumps": lambda passed: passed // JUMP_NS * JUMP_NS + passed % JUMP_NS // CREEP,
}
"""Nanoseconds that a clock shows, from the nanoseconds that passed."""
NAMES = ("monotonic", "perf_counter", "time")


def distort(kind: str, module: Any = time) -> None:
    """Distort the clocks of `module` as `CLOCKS` says, for all callers from now on. Raises
    `KeyError` for an unknown kind."""
    shown = CLOCKS[kind]
    for name in NAMES:
        read = getattr(module, f"{name}_ns")
        began = read()

        def now_ns(read: Callable[[], int] = read, began: int = began) -> int:
            return began + shown(read() - began)

        for place, given in ((f"{name}_ns", now_ns), (name, _in_seconds(now_ns))):
            setattr(module, place, functools.wraps(getattr(module, place))(given))


def _in_seconds(now_ns: Callable[[], int]) -> Callable[[], float]:
    return lambda: now_ns() / 1e9
