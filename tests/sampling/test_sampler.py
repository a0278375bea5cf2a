"""Tokens from logits: the right set, the right distribution, and nothing else matters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from aioserve import _native
from aioserve.errors import InvariantError
from aioserve.ops import Backend
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
    distinct,
    draw,
    logit_rows,
    ranking,
    winner,
)
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE
from tests.sampling.chi_square import deviate
from tests.tiers import examples

ISAS = _native.cpu_info()["isas_supported"]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


# Rows long enough to be spread over buckets, with many ties and few.
long_rows = st.builds(
    lambda seed, size, steps, scale: (
        (np.round(np.random.default_rng(seed).normal(0, scale, size) * steps) / steps)
        .astype(np.float32)
        .tolist()
    ),
    st.integers(0, 10**6),
    st.integers(100, 3000),
    st.sampled_from([1, 8, 10**6]),
    st.sampled_from([0.1, 2.0, 12.0]),
)
limits = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.2, 0.5, 1.0, 3.0]),
        "top_k": st.one_of(st.just(0), st.integers(0, 90), st.integers(90, 3000)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
        "typical_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    }
)


@on_every_backend
@settings(max_examples=examples(100))
@given(
    row=st.one_of(logit_rows, long_rows),
    limits=limits,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10**6),
)
def test_a_draw_is_the_winner_of_the_race_among_what_is_kept(
    backend: Backend, row: list[float], limits: dict[str, Any], seed: int, position: int
) -> None:
    params = SamplingParams(**limits)
    assume(distinct(row, params))
    kept = [(i, row[i] / params.temperature) for i, weight in ranking(row, params) if weight > 0]
    expected = winner(kept, seed, position)
    assert draw(backend, torch.tensor([row]), params, [seed], [position]) == [expected]


@given(
    row=logit_rows, temperature=st.sampled_from([1e-6, 0.3, 1.0, 100.0]), seed=st.integers(0, 99)
)
def test_an_unrestricted_draw_has_a_weight(row: list[float], temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature)
    (token,) = draw(NATIVE, torch.tensor([row]), params, [seed])
    assert row[token] > -math.inf
    assert (row[token] - max(row)) / temperature > -120


def chi_square(
    backend: Backend, row: torch.Tensor, params: SamplingParams, count: int, seed: int
) -> float:
    """Normal deviate of Pearson's statistic of `count` draws (Wilson and Hilferty, 1931)."""
    tokens = draw(backend, row.expand(count, -1), params, [seed] * count, list(range(count)))
    kept = ranking(row.tolist(), params)
    expected = np.array([weight for _, weight in kept])
    expected *= count / expected.sum()
    observed = np.bincount(tokens, minlength=len(row))[[i for i, _ in kept]]
    assert observed.sum() == count, "a token outside the kept set was drawn"
    return deviate(observed, expected)


KINDS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 20},
    {"top_k": 700, "temperature": 3.0},
    {"top_p": 0.6},
    {"top_p": 0.97, "temperature": 4.0},
    {"min_p": 0.02},
    {"min_p": 0.3, "temperature": 5.0},
    {"typical_p": 0.5},
    {"typical_p": 0.95, "temperature": 3.0},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_k": 60, "min_p": 0.04, "temperature": 1.5},
    {"min_p": 0.01, "typical_p": 0.8, "temperature": 1.5},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.7, "temperature": 2.0},
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("backend", "vocab", "count"),
    [(NATIVE, 3000, 6000), (REFERENCE, 300, 1000)],
    ids=["native", "reference"],
)
@pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: " ".join(f"{name}={value}" for name, value in kind.items())
)
def test_draws_follow_the_exact_probabilities(
    kind: dict[str, Any], backend: Backend, vocab: int, count: int
) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2.5
    assert abs(chi_square(backend, row, SamplingParams(**kind), count, seed=5)) < 4


@pytest.mark.more
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


@pytest.mark.parametrize(
    ("vocab", "threads"), [(1, 2), (7, 2), (1000, 2), (8192, 1), (8192, 5), (40_001, 3)]
)
def test_a_row_draws_the_same_token_alone_in_any_order_and_on_any_strides(
    vocab: int, threads: int
) -> None:
    before = _native.cpu_info()["threads"]
    _native.set_num_threads(threads)
    try:
        check_a_row_among_others(NATIVE, vocab, 33)
    finally:
        _native.set_num_threads(before)


@on_every_backend
def test_the_draw_depends_on_the_seed_and_on_the_position(backend: Backend) -> None:
    logits = torch.zeros(1, 5000).expand(200, -1)
    by_seed = draw(backend, logits, SamplingParams(), list(range(200)), [0] * 200)
    by_position = draw(backend, logits, SamplingParams(), [0] * 200, list(range(200)))
    assert len(set(by_seed)) > 180
    assert len(set(by_position)) > 180
    assert by_seed != by_position


@on_every_backend
@settings(max_examples=examples(50))
@given(rows=coarse_rows)
def test_greedy_takes_the_lowest_id_among_the_largest(
    rows: list[list[float]], backend: Backend
) -> None:
    check_greedy(backend, rows)


@on_every_backend
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_k=5, min_p=1, typical_p=1e-9, top_p=1e-9),
    ],
)
def test_keeping_one_token_is_greedy(params: SamplingParams, backend: Backend) -> None:
    check_keeping_one_token(backend, params, 50)


@on_every_backend
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}]
)
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(
    temperature: float, limits: dict[str, Any], backend: Backend
) -> None:
    check_a_tiny_temperature(backend, SamplingParams(temperature=temperature, **limits), 20)


def test_rows_that_there_are_not_are_refused() -> None:
    ones, rows, keys = np.ones(2), np.zeros(2, np.int64), np.zeros(2, np.uint64)
    for drawn in (np.array([2]), np.array([-1])):
        with pytest.raises(ValueError, match="drawn must be rows"):
            _native.draw(0, 1, 0, 0, ones, rows, ones, ones, ones, keys, keys, drawn)
    for short in range(4):
        arrays = [rows, ones, keys, keys]
        arrays[short] = arrays[short][:1]
        top_ks, min_ps, seeds, positions = arrays
        with pytest.raises(ValueError, match="arrays of a draw have different lengths"):
            _native.draw(0, 1, 0, 0, ones, top_ks, ones, min_ps, ones, seeds, positions, rows)


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 7, 33, 1000, 8192])
def test_the_reference_draws_the_same_tokens(vocab: int, isa: str) -> None:
    before = _native.cpu_info()["isa"]
    _native.set_isa(isa)
    try:
        check_against_the_reference(NATIVE, vocab, 44)
    finally:
        _native.set_isa(before)


@on_every_backend
@settings(max_examples=examples(60))
@given(row=st.one_of(logit_rows, long_rows), limits=limits)
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(
    backend: Backend, row: list[float], limits: dict[str, Any]
) -> None:
    """Tokens are compared by their logits, since transformers doesn't say which of equal ones it
    keeps. It keeps all that tie for the last place of `top_k`."""
    params = SamplingParams(**limits)
    ranked = sorted(row, reverse=True)
    k = params.top_k
    assume(not 0 < k < len(row) or ranked[k - 1] - ranked[k] > 1e-4)
    assume(distinct(row, params))
    theirs = [logit for logit, score in zip(row, warped(row, params), strict=True) if score > -80]
    kept = [row[i] for i, weight in ranking(row, params) if weight > math.exp(-80)]
    assert kept == pytest.approx(sorted(theirs, reverse=True), abs=1e-6)
    drawn = draw(backend, torch.tensor([row]).expand(20, -1), params, [3] * 20)
    assert all(min(abs(row[i] - logit) for logit in theirs) < 1e-6 for i in drawn)


def warped(row: list[float], params: SamplingParams) -> list[float]:
    """Return the row as transformers leaves it, in its order."""
    scores, no_ids = torch.tensor([row]), torch.LongTensor(1, 0)
    scores = TemperatureLogitsWarper(params.temperature)(no_ids, scores - scores.max())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(no_ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(no_ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(no_ids, scores)
    if params.typical_p < 1:
        scores = TypicalLogitsWarper(params.typical_p)(no_ids, scores)
    return scores[0].tolist()


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


def test_a_slot_forgets_what_the_one_before_asked_for() -> None:
    slots = SlotTable(2)
    slots.start(0, SamplingParams(top_k=3, top_p=0.1, min_p=0.5, typical_p=0.2), 7)
    slots.start(0, SamplingParams(), 8)
    slots.start(1, SamplingParams(min_p=0.25, typical_p=0.75), 9)
    for _ in range(2):
        rows = slots.rows([0, 1], [4, 5])
        assert rows["top_k"].tolist() == [0, 0]
        assert rows["top_p"].tolist() == [1, 1]
        assert rows["min_p"].tolist() == [0, 0.25]
        assert rows["typical_p"].tolist() == [1, 0.75]
        assert rows.seeds.tolist() == [8, 9]
