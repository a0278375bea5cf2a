"""The noise of steps: as calibration saw it, 1 on average, and the same whichever way it is
asked for."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.errors import ConfigError
from aioserve.simulation.calibration import StepSample, fit_table
from aioserve.simulation.cost import CostTable, MeasuredKV, StepLoad
from aioserve.simulation.step_noise import BLOCK_STEPS, NUM_RANKS, StepNoise
from tests.simulation.test_calibration import DECODE, PREFILL, loads, made_table

SEEDS = st.integers(0, 2**64 - 1)
TABLE: dict[str, Any] = {
    "prefill_tokens": [0, 100, 300],
    "decode_batch": [0, 8],
    "seconds": [[0.0, 0.2], [1.0, 1.4], [2.0, 2.4]],
}


def even(*ratios: float) -> list[list[list[float]]]:
    """The same at each point of that table."""
    return [[list(ratios)] * 2] * 3


ORDERS = st.none() | st.lists(st.integers(0, NUM_RANKS - 1), min_size=1, max_size=40)


@given(SEEDS, st.integers(1, 2**40), st.integers(0, 2 * BLOCK_STEPS), ORDERS)
def test_several_draws_at_once_are_those_of_single_steps(
    seed: int, step: int, count: int, order: list[int] | None
) -> None:
    noise = StepNoise([[[0.5, 1.5]]], (1, 1), order)
    several = noise.draws(seed, step, count)
    assert several.tolist() == [noise.draw(seed, step + k) for k in range(count)]
    single = [noise.ratio(0, 0, noise.draw(seed, step + k)) for k in range(count)]
    assert noise.ratios(0, 0, several).tolist() == single


@settings(deadline=None)
@given(
    SEEDS,
    st.integers(1, 2**32),
    st.integers(0, 600),
    st.integers(0, 20),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.booleans(),
)
def test_several_steps_at_once_take_to_the_digit_what_single_ones_do(
    seed: int, step: int, prefill: int, batch: int, context: int, pairs: int, scatters: bool
) -> None:
    table = CostTable(
        **TABLE,
        seconds_per_context_token=1.7e-7,
        seconds_per_attended_pair=3.1e-9,
        step_noise=even(0.7, 0.9, 0.95, 1.45),
    )
    found = table.decode_seconds(
        StepLoad(prefill, batch, context, pairs),
        40,
        seed=seed if scatters else None,
        step=step,
    ).tolist()
    for number, seconds in enumerate(found):
        load = StepLoad(prefill, batch, context + number * batch, pairs)
        if scatters:
            assert seconds == table.noisy_seconds(load, seed, step + number)
        else:
            assert seconds == table.seconds(load)


def test_each_ratio_is_drawn_as_often_and_no_draw_tells_the_next() -> None:
    noise = StepNoise([[[0.5, 1.0, 1.5]]], (1, 1))
    ratios = np.array([noise.ratio(0, 0, noise.draw(7, step)) for step in range(30_000)])
    values, counts = np.unique(ratios, return_counts=True)
    assert values.tolist() == [0.5, 1.0, 1.5]
    assert counts.min() > 9_700
    assert abs(np.corrcoef(ratios[:-1], ratios[1:])[0, 1]) < 0.02
    others = [noise.ratio(0, 0, noise.draw(8, step)) for step in range(30_000)]
    assert abs(np.corrcoef(ratios, others)[0, 1]) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_slow_steps_come_together_as_they_were_measured(seed: int) -> None:
    """A machine that is slow for 50 steps of 200: means of 50 steps vary as those measured did."""
    table, rng = made_table(), np.random.default_rng(seed)
    slow = np.tile(np.repeat([1.6, 0.8, 0.8, 0.8], 50), 40)
    measured = slow * rng.lognormal(0, 0.05, len(slow))
    steps = loads(seed, len(measured))[-len(measured) :]
    samples = [
        StepSample(load, table.seconds(load) * ratio)
        for load, ratio in zip(steps, measured.tolist(), strict=True)
    ]
    found = fit_table(samples, PREFILL, DECODE)

    def means_vary(file: Any) -> float:
        cost = file.table()
        ratios = [
            cost.noisy_seconds(load, seed, number) / cost.seconds(load)
            for number, load in enumerate(steps)
        ]
        assert np.mean(ratios) == pytest.approx(1, abs=0.05)
        return float(np.std(np.mean(np.reshape(ratios, (-1, 50)), axis=1)))

    true = float(np.std(np.mean(np.reshape(measured, (-1, 50)), axis=1)))
    assert means_vary(found) == pytest.approx(true, rel=0.4)
    assert means_vary(replace(found, noise_order=None)) < true / 4


def test_the_order_of_noise_is_checked() -> None:
    wrong: tuple[tuple[Any, str], ...] = (
        ([], r"1 to 65,536 ranks in \[0, 255\], got 0"),
        ([256], "from 256 to 256"),
        ([-1], "from -1 to -1"),
        ([0.5], "got 1 from 0.5"),
        (7, "noise_order"),
    )
    for order, message in wrong:
        with pytest.raises(ConfigError, match=message):
            CostTable(**TABLE, step_noise=even(0.5, 1.5), noise_order=cast("Any", order))
    with pytest.raises(ConfigError, match="must grow at each point"):
        CostTable(**TABLE, step_noise=even(1.5, 0.5), noise_order=[1])
    with pytest.raises(ConfigError, match="no step_noise that it could be the order of"):
        CostTable(**TABLE, noise_order=[1])


def test_a_step_scatters_as_the_nearest_point_does() -> None:
    points = [[[1.0], [1.001]], [[1.002], [1.003]], [[1.004], [1.005]]]
    table = CostTable(**TABLE, step_noise=points)
    for (prefill, batch), ratio in {
        (40, 4): 1.0,
        (40, 5): 1.001,
        (60, 0): 1.002,
        (199, 9): 1.003,
        (900, 1): 1.004,
        (900, 90): 1.005,
    }.items():
        load = StepLoad(prefill, batch, 0, 0)
        assert table.noisy_seconds(load, 1, 1) == table.seconds(load) * ratio


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_simulated_steps_scatter_as_measured_ones_did(sigma: float) -> None:
    table, source = made_table(), np.random.default_rng(3)
    samples = [
        StepSample(load, table.seconds(load) * float(source.lognormal(0, sigma)))
        for load in loads(0, 4000)
    ]
    found = fit_table(samples, PREFILL, DECODE).table()
    ratios = [
        found.noisy_seconds(load, 11, step) / table.seconds(load)
        for step, load in enumerate(loads(1, 4000))
    ]
    measured = [sample.seconds / table.seconds(sample.load) for sample in samples]
    assert np.mean(ratios) == pytest.approx(np.mean(measured), rel=0.01)
    for rank in (10, 25, 50, 75, 90):
        expected = np.percentile(measured, rank)
        assert np.percentile(ratios, rank) == pytest.approx(expected, rel=0.1 * sigma)


def test_the_scatter_of_a_kind_of_steps_is_no_others() -> None:
    table, source = made_table(), np.random.default_rng(3)
    sigmas = {False: 0.02, True: 0.4}
    samples = [
        StepSample(
            load, table.seconds(load) * float(source.lognormal(0, sigmas[load.prefill_tokens > 8]))
        )
        for load in loads(0, 4000)
    ]
    noise = fit_table(samples, PREFILL, DECODE).table().step_noise
    assert noise is not None
    for i in range(len(PREFILL)):
        for j in range(len(DECODE)):
            low, high = noise.percentiles(i, j, (10, 90))
            # Of a normal distribution, these are 2.56 sigmas apart.
            width = np.log(high / low) / 2.56
            assert width == pytest.approx(sigmas[i > 0], rel=0.35) or (i, j) == (0, 0)


def test_few_steps_and_many_alike_have_a_scatter_of_1_on_average() -> None:
    for count in (30, 300):
        samples = [StepSample(load, 1.0 + 0.3 * (n % 3)) for n, load in enumerate(loads(0, count))]
        file = fit_table(samples, PREFILL, DECODE)
        assert np.array(file.step_noise).mean(axis=2) == pytest.approx(1, abs=1e-4)
        assert file.table().step_noise is not None


@pytest.mark.parametrize(
    ("step_noise", "message"),
    [
        (even(0.9, 1.2), r"1 on average at each point, got 1.05 at \[0\]\[0\]"),
        (even(0.0, 2.0), "ratios above 0 and at most 1000"),
        (even(float("nan"), 2.0), "ratios above 0 and at most 1000"),
        (even(), "a grid of 3 by 2 points with 1 to 256 ratios each"),
        (even(*[1.0] * 257), "a grid of 3 by 2 points with 1 to 256 ratios each"),
        (even(1.0)[:2], "a grid of 3 by 2 points"),
        ([[[1.0], [1.0, 1.0]]] * 3, "as many for all"),
        (7, "cost table: step_noise: "),
    ],
)
def test_a_scatter_that_is_none_is_refused(step_noise: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostTable(**TABLE, step_noise=step_noise)


def test_a_table_without_scatter_draws_none() -> None:
    with pytest.raises(ConfigError, match="the cost table has no noise"):
        CostTable(**TABLE).noisy_seconds(StepLoad(0, 1, 1, 0), 1, 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_pages", 0, "kv: num_pages must be at least 1, got 0"),
        ("page_size", 0.5, "kv: page_size must be an int, got 0.5"),
        ("max_model_len", 1, "kv: max_model_len must be at least 2, got 1"),
        ("bytes_per_token", -1, "kv: bytes_per_token must be at least 1, got -1"),
    ],
)
def test_a_kv_size_that_is_none_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MeasuredKV(8, 16, 100, 2), **{field: value})
