"""Rounding to GGUF's formats, with the layouts and the accuracy of the library that made them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import WeightsError
from aioserve.models.gguf.encoding import ENCODED, encoded
from aioserve.models.gguf.formats import decoded
from aioserve.models.weight_integers import WeightIntegers
from tests.models.gguf.writing import BY_NAME, quantized, reference

NAMES = sorted(ENCODED)
ROUNDED = sorted(set(NAMES) - {"F32", "F16", "BF16"})


def weights_of(seed: int, spread: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((16, 512)).astype(np.float32) * 0.02
    if spread == "heavy tails":
        weight = rng.standard_t(3, (16, 512)).astype(np.float32) * 0.02
    if spread == "off centre":
        weight += rng.uniform(-0.05, 0.05, (16, 1)).astype(np.float32)
    if spread == "outliers":
        weight[:, rng.integers(0, 512, 3)] *= 30
    return weight


def read_back(name: str, rows: np.ndarray) -> np.ndarray:
    found = decoded(BY_NAME[name], rows)
    return found.dequantized() if isinstance(found, WeightIntegers) else found


@given(
    name=st.sampled_from(ROUNDED),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from(["normal", "heavy tails", "off centre", "outliers"]),
)
def test_the_error_is_no_larger_than_that_of_the_library(name: str, seed: int, spread: str):
    weight = weights_of(seed, spread)
    ours, theirs = encoded(BY_NAME[name], weight), quantized(weight, name)
    assert ours.shape == theirs.shape
    errors = [np.square(read_back(name, rows) - weight).sum() for rows in (ours, theirs)]
    assert errors[0] <= 1.02 * errors[1]
    assert np.array_equal(reference(ours, BY_NAME[name]), read_back(name, ours))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_are_those_of_the_library(name: str):
    weight = weights_of(1, "heavy tails")
    assert np.array_equal(encoded(BY_NAME[name], weight), quantized(weight, name))


@given(name=st.sampled_from(ROUNDED), seed=st.integers(0, 2**32))
def test_what_the_format_holds_exactly_stays(name: str, seed: int):
    """A rounded weight hardly changes when it is rounded again."""
    weight = weights_of(seed, "normal")
    once = read_back(name, encoded(BY_NAME[name], weight))
    twice = read_back(name, encoded(BY_NAME[name], once))
    assert np.square(twice - once).sum() <= 0.25 * np.square(once - weight).sum()


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, -3e4])
def test_rows_of_one_number_are_given_back(name: str, value: float):
    weight = np.full((2, 256), value, np.float32)
    weight[1] = 0
    back = read_back(name, encoded(BY_NAME[name], weight))
    assert np.isfinite(back).all()
    assert np.allclose(back, weight, rtol=0.02, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_refused(name: str):
    for bad in (np.nan, np.inf, -np.inf):
        weight = np.ones((2, 256), np.float32)
        weight[1, 3] = bad
        with pytest.raises(WeightsError, match="NaN and infinity"):
            encoded(BY_NAME[name], weight)
    if name not in ("F32", "BF16"):
        with pytest.raises(WeightsError, match="beyond 65504"):
            encoded(BY_NAME[name], np.full((1, 256), 1e30, np.float32))
