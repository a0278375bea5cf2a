"""Slow code is found, and code that other programs delay is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests import timing
from tests.timing import TRIES, computing_at_most, seconds_at_best, seconds_computing

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "clock_counts", lambda: True)


def compute(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


def test_what_computes_for_long_is_found_and_what_is_delayed_is_not() -> None:
    with computing_at_most(0.1):
        time.sleep(0.3)
    with pytest.raises(AssertionError), computing_at_most(0.01):
        compute(1.0)


def test_seconds_are_those_of_the_processor() -> None:
    assert seconds_computing(lambda: compute(0.2)) >= 0.1
    assert seconds_computing(lambda: time.sleep(0.3)) < 0.2


def waiting(*seconds: float) -> Callable[[], None]:
    left = list(seconds)
    return lambda: time.sleep(left.pop(0))


def test_what_waits_each_time_is_found_and_a_single_delay_is_not() -> None:
    assert seconds_at_best(waiting(*[0.05] * TRIES), enough=0.03) >= 0.05
    once = waiting(0.05, 0, *[0.05] * TRIES)
    assert seconds_at_best(once, enough=0.05) < 0.05


def test_where_no_clock_counts_the_block_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "clock_counts", lambda: False)
    monkeypatch.setattr(timing, "slowness", lambda: 0.0)
    ran = False
    with computing_at_most(-1.0):
        ran = True
    assert ran
