"""Tests that send signals work wherever the tests were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.heard_signals import ENDING, heard_signals

NUMBERS = ", ".join(str(int(number)) for number in ENDING)
IGNORED_IN_A_CHILD = (
    f"import signal; print([n for n in [{NUMBERS}] if signal.getsignal(n) is signal.SIG_IGN])"
)


def ignored_in_a_child() -> str:
    return subprocess.check_output(
        [sys.executable, "-c", IGNORED_IN_A_CHILD], text=True, timeout=200
    ).strip()


@pytest.fixture
def ignored() -> Iterator[None]:
    before = [signal.signal(number, signal.SIG_IGN) for number in ENDING]
    try:
        yield
    finally:
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.usefixtures("ignored")
def test_a_process_that_is_started_ignores_no_signal_although_this_one_did() -> None:
    assert ignored_in_a_child() == f"[{NUMBERS}]"
    with heard_signals():
        assert ignored_in_a_child() == "[]"
        for number in ENDING:
            signal.raise_signal(number)  # and this one goes on
    assert {signal.getsignal(number) for number in ENDING} == {signal.SIG_IGN}


def test_what_tests_start_ignores_no_signal() -> None:
    assert ignored_in_a_child() == "[]"


def test_a_signal_that_is_handled_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with heard_signals():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
