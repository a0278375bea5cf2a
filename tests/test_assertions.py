"""Tests can fail, under `python -O` too: it drops each `assert` that pytest didn't rewrite."""

from __future__ import annotations

import pytest

from tests.scheduling.bench import Bench


def test_an_assertion_of_a_test_is_checked() -> None:
    with pytest.raises(AssertionError):
        assert Bench is None


def test_an_assertion_of_a_helper_is_checked() -> None:
    bench = Bench()
    with pytest.raises(AssertionError):
        _ = bench.host
