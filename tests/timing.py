"""Measured times on a machine that has other work too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tests.attacks.held_loop import collector_at_rest, slowness
from tests.tiers import clock_counts

__all__ = ["computing_at_most", "seconds_at_best", "seconds_computing"]

TRIES = 5


def seconds_computing(call: Callable[[], object]) -> float:
    """The processor time of this thread that `call` takes, to compare with another. For tests that
    are marked `more`."""
    clock_counts()  # which asks for a mark
    began = time.thread_time()
    call()
    return time.thread_time() - began


@contextlib.contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Assert that the block takes less than `seconds` of this process's CPU time, with the
    `collector_at_rest`.

    The limit grows in proportion if the machine is slow at this moment. Time spent waiting doesn't
    count; the time limit of tests ends it. Where measured times don't count (`clock_counts`), the
    block runs unmeasured.
    """
    if not clock_counts():
        yield
        return
    with collector_at_rest():
        began = time.process_time()
        yield
        computed = time.process_time() - began
    assert computed < seconds or computed < seconds * slowness(), f"{computed:.2f} s"


def seconds_at_best(call: Callable[[], object], *, enough: float) -> float:
    """Return the real seconds that `call` takes in the best of some tries.

    The first try that takes less than `enough` ends them. A call that waits does so each time, and
    other programs seldom delay all tries. Where measured times don't count (`clock_counts`), it is
    called once and the result is 0.
    """
    taken: list[float] = []
    while len(taken) < TRIES:
        began = time.monotonic()
        call()
        if not clock_counts():
            return 0.0
        taken.append(time.monotonic() - began)
        if taken[-1] < enough:
            break
    return min(taken)
