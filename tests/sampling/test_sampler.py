"""Tokens from logits: the right set, the right distribution, and nothing else matters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.ops import Backend, draws
from aioserve.ops.philox import uniforms
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable
from tests.ops.draw_scenes import (
    GREEDY,
    check_a_bad_row,
    check_a_row_among_others,
    check_a_tiny_temperature,
    check_against_the_reference,
    check_an_empty_batch,
    check_equal_logits,
    check_greedy,
    check_keeping_one_token,
    check_logits_stay,
    check_logits_that_do_not_fit,
    check_the_nucleus,
    check_top_k_before_top_p,
    coarse_rows,
    draw,
    logit_rows,
    ranking,
)
from tests.ops.scenarios import BACKENDS, NATIVE

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@pytest.mark.parametrize("buckets", [1, 2, 16])
def test_a_restricted_draw_inverts_the_distribution_of_the_ranked_tokens(buckets: int) -> None:
    @given(
        row=logit_rows,
        temperature=st.sampled_from([0.2, 0.5, 1.0, 3.0]),
        top_k=st.integers(0, 90),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 10**6),
    )
    def check(
        row: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
    ) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        assume(0 < top_k < len(row) or top_p < 1)
        candidates = ranking(row, SamplingParams(temperature=temperature, top_k=top_k))
        ends = np.cumsum([weight for _, weight in candidates])
        kept = ranking(row, params)
        target = uniforms([seed], [position])[0] * ends[len(kept) - 1]
        # Skip what float32 may round to either side: the end of the nucleus, the draw's borders.
        assume(top_p == 1 or np.abs(ends / ends[-1] - top_p).min() > 1e-5)
        assume(np.abs(ends - target).min() > 1e-5 * ends[len(kept) - 1])
        expected = kept[int(np.searchsorted(ends, target, side="right"))][0]
        assert draw(NATIVE, torch.tensor([row]), params, [seed], [position]) == [expected]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_SORTED_AT_ONCE", 0)
        patch.setattr(draws, "_BUCKETS", buckets)
        check()


@given(
    row=logit_rows, temperature=st.sampled_from([1e-6, 0.3, 1.0, 100.0]), seed=st.integers(0, 99)
)
def test_an_unrestricted_draw_has_a_weight(row: list[float], temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature)
    (token,) = draw(NATIVE, torch.tensor([row]), params, [seed])
    assert row[token] > -math.inf
    assert (row[token] - max(row)) / temperature > -120


def chi_square(row: torch.Tensor, params: SamplingParams, count: int, seed: int) -> float:
    """Normal deviate of Pearson's statistic of `count` draws (Wilson and Hilferty, 1931)."""
    tokens = draw(NATIVE, row.expand(count, -1), params, [seed] * count, list(range(count)))
    kept = ranking(row.tolist(), params)
    expected = np.array([weight for _, weight in kept])
    expected *= count / expected.sum()
    observed = np.bincount(tokens, minlength=len(row))[[i for i, _ in kept]]
    assert observed.sum() == count, "a token outside the kept set was drawn"
    common = expected >= 5
    rest = expected[~common].sum()
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    cells = int(common.sum())
    if rest >= 5:
        statistic += (observed[~common].sum() - rest) ** 2 / rest
        cells += 1
    degrees = cells - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=20),
        SamplingParams(top_k=700, temperature=3.0),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.97, temperature=4.0),
        SamplingParams(top_k=12, top_p=0.8, temperature=1.5),
    ],
    ids=lambda params: f"T={params.temperature:g} k={params.top_k} p={params.top_p:g}",
)
def test_draws_follow_the_exact_probabilities(params: SamplingParams) -> None:
    row = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * 2.5
    assert abs(chi_square(row, params, 8000, seed=5)) < 4


@on_every_backend
def test_draws_with_different_seeds_follow_the_exact_probabilities(backend: Backend) -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(4))
    count = 8000
    tokens = draw(
        backend, row.expand(count, -1), SamplingParams(), list(range(count)), [17] * count
    )
    expected = torch.softmax(row.double(), 0).numpy() * count
    observed = np.bincount(tokens, minlength=50)
    assert ((observed - expected) ** 2 / expected).sum() < 100  # p < 1e-4 at 49 degrees


@pytest.mark.parametrize("vocab", [1, 7, 1000, 8192, 40_001])
def test_a_row_draws_the_same_token_alone_in_any_order_and_on_any_strides(vocab: int) -> None:
    check_a_row_among_others(NATIVE, vocab, 24)


@on_every_backend
def test_the_draw_depends_on_the_seed_and_on_the_position(backend: Backend) -> None:
    logits = torch.zeros(1, 5000).expand(200, -1)
    by_seed = draw(backend, logits, SamplingParams(), list(range(200)), [0] * 200)
    by_position = draw(backend, logits, SamplingParams(), [0] * 200, list(range(200)))
    assert len(set(by_seed)) > 180
    assert len(set(by_position)) > 180
    assert by_seed != by_position


@on_every_backend
@settings(max_examples=50)
@given(rows=coarse_rows)
def test_greedy_takes_the_lowest_id_among_the_largest(
    rows: list[list[float]], backend: Backend
) -> None:
    check_greedy(backend, rows)


@on_every_backend
@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_keeping_one_token_is_greedy(params: SamplingParams, backend: Backend) -> None:
    check_keeping_one_token(backend, params, 50)


@on_every_backend
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(
    temperature: float, limits: dict[str, Any], backend: Backend
) -> None:
    check_a_tiny_temperature(backend, SamplingParams(temperature=temperature, **limits), 20)


@pytest.mark.parametrize("limits", [{}, {"top_k": 90}, {"top_p": 0.999}])
@pytest.mark.parametrize("vocab", [100, 3000])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_token_with_a_weight(
    vocab: int, limits: dict[str, float]
) -> None:
    row = np.full(vocab, -np.inf, dtype=np.float32)
    row[[40, 41]] = 1.0, 0.5
    kept = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **limits}
    sampler = draws.RowSampler(vocab)
    assert sampler.draw(row, 1.0, 0.0, **kept) in (40, 41)
    drawn = {sampler.draw(row, 1.0, uniform, **kept) for uniform in (0.0, 1 - 2**-53)}
    assert drawn == {40, 41}


def test_a_target_that_rounding_put_at_the_end_draws_the_last_token_with_a_weight() -> None:
    ends = np.array([0.0, 0.5, 1.0, 1.0])
    assert [draws._first_above(ends, target) for target in (0.0, 0.5, 1.0, 2.0)] == [
        1,
        2,
        2,
        2,
    ]


@on_every_backend
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(backend: Backend) -> None:
    check_the_nucleus(backend, 400)


@on_every_backend
def test_top_k_comes_before_top_p(backend: Backend) -> None:
    check_top_k_before_top_p(backend, 400)


@on_every_backend
@pytest.mark.parametrize("vocab", [100, 20_000])
def test_among_equal_logits_lower_ids_are_kept(vocab: int, backend: Backend) -> None:
    check_equal_logits(backend, vocab, range(400))


@on_every_backend
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_reported_and_disturbs_no_other(bad: float, backend: Backend) -> None:
    check_a_bad_row(backend, bad, range(4), 24)


@on_every_backend
def test_logits_are_left_as_they_were(backend: Backend) -> None:
    check_logits_stay(backend, 12)


@on_every_backend
def test_an_empty_batch_has_no_tokens(backend: Backend) -> None:
    check_an_empty_batch(backend)


@pytest.mark.parametrize("vocab", [1, 7, 33, 1000, 8192])
def test_the_reference_draws_the_same_tokens(vocab: int) -> None:
    check_against_the_reference(NATIVE, vocab, 120)


@on_every_backend
def test_logits_that_do_not_fit_are_refused(backend: Backend) -> None:
    check_logits_that_do_not_fit(backend)


def test_a_slot_that_was_not_started_samples_nothing() -> None:
    slots = SlotTable(3)
    slots.start(1, GREEDY, 0)
    slots.start(2, GREEDY, 0)
    slots.end(2)
    with pytest.raises(InvariantError, match=r"slots \[0, 2\] sample, but have not started"):
        slots.rows([0, 1, 2], [5, 5, 5])
