"""Fitting cost tables: what steps took is found again, whatever held some of them up."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.errors import ConfigError
from aioserve.simulation.calibration import (
    PredictionError,
    StepSample,
    fit_table,
    prediction_error,
)
from aioserve.simulation.cost import CostTable, StepLoad
from tests.tiers import examples

PREFILL = (0, 16, 64, 256)
DECODE = (0, 1, 4, 16)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """A table with those axes that grows along both."""
    parts = [draw(st.lists(st.floats(1e-4, 0.1), min_size=4, max_size=4)) for _ in range(2)]
    grid = np.add.outer(np.cumsum(parts[0]), np.cumsum(parts[1]))
    grid[0, 0] = grid[0, 1]
    return CostTable(
        PREFILL,
        DECODE,
        np.maximum.accumulate(grid, axis=0).tolist(),
        seconds_per_context_token=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        seconds_per_attended_pair=draw(st.sampled_from([0.0, 1e-8, 1e-6])),
    )


def loads(seed: int, count: int = 400) -> list[StepLoad]:
    """Random mixes, some beyond the grid."""
    source = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        prefill, decode = (int(n) * int(source.integers(2)) for n in source.integers(0, [400, 24]))
        start, context = source.integers(0, 500, 2)
        pairs = prefill * int(start) + prefill * (prefill + 1) // 2
        if prefill or decode:
            found.append(StepLoad(prefill, decode, decode * int(context), pairs))
    points = [StepLoad(p, d, 100 * d, p * p) for p, d in product(PREFILL, DECODE) if p or d]
    return found + points


@settings(deadline=None, max_examples=examples(25))
@given(tables(), st.integers(0, 10**6))
def test_a_fit_finds_the_table_that_steps_were_made_of(table: CostTable, seed: int) -> None:
    samples = [StepSample(load, table.seconds(load)) for load in loads(seed)]
    found = fit_table(samples, PREFILL, DECODE).table()
    for load in loads(seed + 1, 50):
        assert found.seconds(load) == pytest.approx(table.seconds(load), rel=1e-2)


def made_table() -> CostTable:
    grid = np.add.outer([0.001, 0.002, 0.006, 0.03], [0.001, 0.001, 0.002, 0.004])
    return CostTable(PREFILL, DECODE, grid.tolist(), seconds_per_context_token=1e-6)


def test_a_few_steps_that_were_held_up_change_little() -> None:
    table, source = made_table(), np.random.default_rng(0)
    samples = []
    for load in loads(0, 2000):
        held_up = source.choice(
            [1.0, 1.0, 1.0, 1.0, 1.0, 0.05, 3.0, 100.0], p=[0.19] * 5 + [0.05 / 3] * 3
        )
        samples.append(StepSample(load, table.seconds(load) * float(held_up)))
    found = fit_table(samples, PREFILL, DECODE).table()
    ratios = [found.seconds(load) / table.seconds(load) for load in loads(1, 50)]
    # The level follows the sum, in which a step counts for at most five.
    assert 1.0 < np.median(ratios) < 1.15
    assert np.percentile(ratios, 90) / np.percentile(ratios, 10) < 1.02


@pytest.mark.parametrize("seed", range(8))
def test_steps_beyond_an_axis_of_one_sequence_are_told(seed: int) -> None:
    noise = np.random.default_rng(seed)
    mixes = ((0, 1, 106), (0, 2, 72), (16, 0, 12), (16, 1, 8), (31, 1, 8), (32, 0, 38))
    samples = [
        StepSample(
            StepLoad(prefill, decode, decode * (16 if number % 2 else 512), prefill * prefill),
            float(0.001 * (1 + prefill / 48) * noise.lognormal(0.0, 0.25)),
        )
        for prefill, decode, count in mixes
        for number in range(count)
    ]
    found = fit_table(samples, (0, 16, 32), (0, 1))
    assert abs(prediction_error(found.table(), samples).total) < 0.1
    assert found.seconds[0][1] == pytest.approx(0.001, rel=0.25)


@pytest.mark.parametrize(
    ("error", "poor"),
    [
        (PredictionError(9, 0.1, 5.0, 0.2), False),
        (PredictionError(9, 0.51, 0.6, 0.0), True),
        (PredictionError(9, 0.1, 0.2, -0.26), True),
        (PredictionError(9, 0.1, 0.2, 0.26), True),
        (PredictionError(9, float("nan"), 0.2, 0.0), True),
    ],
)
def test_a_table_that_is_far_off_is_poor(error: PredictionError, poor: bool) -> None:
    assert error.is_poor == poor


def test_context_that_seems_to_cost_less_than_nothing_costs_nothing() -> None:
    samples = [StepSample(load, 1.0 - 1e-6 * load.context_tokens) for load in loads(0)]
    found = fit_table(samples, PREFILL, DECODE)
    assert found.seconds_per_context_token == 0.0
    table = found.table()
    assert table.seconds(StepLoad(16, 4, 10**6, 0)) == table.seconds(StepLoad(16, 4, 0, 0))


def test_errors_are_relative_to_what_was_measured() -> None:
    table = CostTable([0, 1], [0, 1], [[1.0, 1.0], [1.0, 1.0]])
    load = StepLoad(1, 1, 0, 0)
    error = prediction_error(table, [StepSample(load, s) for s in (1.0, 2.0, 0.8)])
    assert (error.steps, error.median) == (3, 0.25)
    assert error.p90 == pytest.approx(0.45)
    assert error.total == pytest.approx(3 / 3.8 - 1)


def test_points_without_steps_are_named() -> None:
    samples = [StepSample(StepLoad(0, 1, 0, 0), 1.0), StepSample(StepLoad(9, 0, 0, 45), 1.0)]
    with pytest.raises(ConfigError, match="near prefill_tokens=16 and decode_batch=1"):
        fit_table(samples, (0, 16, 64), (0, 1))
    with pytest.raises(ConfigError, match="no step was measured near"):
        fit_table([], (0, 16), (0, 1))


@pytest.mark.parametrize("axis", [(0,), (1, 2), (0, 5, 5)])
def test_axes_that_are_none_are_refused(axis: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="decode_batch must be two or more growing counts from 0"):
        fit_table([], (0, 16), axis)
