"""How long something takes, on a machine that has other work too."""

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
    """Holds that the block takes no more processor time of this process than that, or in proportion
    where the machine is slow at this moment, with the `collector_at_rest`. What waits is ended by
    the time limit of tests. Where no `clock_counts`, the block is run and that is all."""
    if not clock_counts():
        yield
        return
    with collector_at_rest():
        began = time.process_time()
        yield
        computed = time.process_time() - began
    assert computed < seconds or computed < seconds * slowness(), f"{computed:.2f} s"


def seconds_at_best(call: Callable[[], object], *, enough: float) -> float:
    """The real time that `call` takes in the best of some tries, or in the first that takes less
    than `enough`: what waits does so each time, and other programs seldom delay them all. Where no
    `clock_counts`, it is called once and takes none."""
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
