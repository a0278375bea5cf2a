"""Intervals cover the truth as often as they say, even for tokens that depend on each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aioserve.cli._evaluation.intervals import BLOCKS, LEAST_TOKENS, Estimate, ratio_of_sums


def coverage(dependence: float, tokens: int = 3000, texts: int = 400) -> float:
    """Share of random autoregressive texts whose interval holds the mean, 5."""
    source, held = np.random.default_rng(0), 0
    for _ in range(texts):
        noise = source.normal(size=tokens)
        values = np.empty(tokens)
        last = source.normal() / math.sqrt(1 - dependence**2)
        for place in range(tokens):
            values[place] = last = dependence * last + noise[place]
        estimate = ratio_of_sums(5 + values, np.ones(tokens))
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 5 <= estimate.high
    return held / texts


@pytest.mark.parametrize("dependence", [0.0, 0.9])
def test_nineteen_of_twenty_intervals_hold_the_mean(dependence: float) -> None:
    assert 0.90 <= coverage(dependence) <= 0.99


def test_of_tokens_with_bytes_the_ratio_of_the_sums_is_told() -> None:
    source = np.random.default_rng(1)
    num_bytes = source.integers(1, 9, size=900).astype(np.float64)
    # A constant number of bits per byte has no uncertainty, however long tokens are.
    estimate = ratio_of_sums(1.5 * num_bytes, num_bytes)
    assert estimate.value == pytest.approx(1.5)
    assert estimate.low == pytest.approx(1.5)
    assert estimate.high == pytest.approx(1.5)


def test_too_few_tokens_have_no_interval() -> None:
    few, enough = np.arange(LEAST_TOKENS - 1.0), np.arange(float(LEAST_TOKENS))
    assert ratio_of_sums(few, np.ones(len(few))) == Estimate((LEAST_TOKENS - 2) / 2)
    assert ratio_of_sums(enough, np.ones(len(enough))).low is not None


def test_an_infinite_mean_has_no_interval() -> None:
    values = np.ones(600)
    values[7] = math.inf
    assert ratio_of_sums(values, np.ones(600)) == Estimate(math.inf)


def test_blocks_are_students_of_their_number() -> None:
    values = np.repeat(np.arange(float(BLOCKS)), 20)
    estimate = ratio_of_sums(values, np.ones(len(values)))
    expected = 2.0452 * np.std(np.arange(BLOCKS), ddof=1) / math.sqrt(BLOCKS)
    assert estimate.high == pytest.approx(estimate.value + expected, rel=1e-4)
    assert estimate.low == pytest.approx(estimate.value - expected, rel=1e-4)
    assert estimate.within(14.0, 15.0) == Estimate(14.5, 14.0, 15.0)
