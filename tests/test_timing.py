"""What takes long is found, and what other programs delay is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.timing import TRIES, computing_at_most, seconds_at_best


def compute(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


def test_what_computes_for_long_is_found_and_what_is_delayed_is_not() -> None:
    with computing_at_most(0.1):
        time.sleep(0.3)
    with pytest.raises(AssertionError), computing_at_most(0.01):
        compute(1.0)


def waiting(*seconds: float) -> Callable[[], None]:
    left = list(seconds)
    return lambda: time.sleep(left.pop(0))


def test_what_waits_each_time_is_found_and_a_single_delay_is_not() -> None:
    assert seconds_at_best(waiting(*[0.05] * TRIES), enough=0.03) >= 0.05
    once = waiting(0.05, 0, *[0.05] * TRIES)
    assert seconds_at_best(once, enough=0.05) < 0.05
