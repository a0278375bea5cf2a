"""How long something takes, on a machine that has other work too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tests.attacks.held_loop import collector_at_rest, slowness
from tests.tiers import clock_counts

__all__ = ["computing_at_most", "seconds_computing"]


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
