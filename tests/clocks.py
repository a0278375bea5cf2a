"""Clocks that go wrong: what a test asserts holds by each of them, as it would on a slower machine,
on a faster one, and on one that does something else now and again.

`AIOSERVE_CLOCK=fast` makes the clocks of a test process go five times faster, `slow` five times
slower, and `jumps` lets them nearly stand still for a while and then leap. Processor time isn't
changed, and neither are programs that a test starts anew. Tests marked `more` and `alone` may watch
the clock: they are left out, and what is marked `clock` looks at none (`make test-clocks`).
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
"""So many times slower a clock goes between two jumps."""

CLOCKS: dict[str, Callable[[int], int]] = {
    "fast": lambda passed: passed * RATE,
    "slow": lambda passed: passed // RATE,
    "jumps": lambda passed: passed // JUMP_NS * JUMP_NS + passed % JUMP_NS // CREEP,
}
"""Nanoseconds that a clock shows to have passed, by those that have."""
NAMES = ("monotonic", "perf_counter", "time")


def distort(kind: str, module: Any = time) -> None:
    """Let the clocks of `module` go as `CLOCKS` has it, for whoever asks it from now on. Raises
    `KeyError` for another kind."""
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
