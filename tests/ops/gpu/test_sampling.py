"""Draws on the GPU: the definition to the last bit, for given weights, and the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from aioserve.ops.gpu import filters, sampling
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.race import exponential
from aioserve.ops.gpu.selection import MAX_VOCAB
from aioserve.ops.philox import exponentials
from aioserve.request import SamplingParams
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
    every_kind_of_params,
    logit_rows,
    ranking,
    sample,
    winner,
)
from tests.ops.scenarios import REFERENCE
from tests.tiers import examples


@pytest.fixture(autouse=True)
def _numbers_leave_the_range_of_float32() -> Iterator[None]:
    """Silence numpy's warnings of overflow, which devices don't have."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def backend():
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


def weights_of(row: npt.NDArray[np.float32], temperature: float) -> list[int]:
    """Compute weights like the device. On a GPU, powers are off by some rounding steps."""
    by = np.float32(min(max(1.0 / temperature, 1e-37), 3.4e38))
    return (np.exp((row - row.max()) * by) * np.float32(2**40)).astype(np.int64).tolist()


def defined(row: npt.NDArray[np.float32], params: SamplingParams, seed: int, position: int) -> int:
    """Draw a token by the definition, with weights as Python's integers."""
    vocab = len(row)
    weights = weights_of(row, params.temperature)
    order = sorted(range(vocab), key=lambda i: (-row[i], i))
    order = order[: params.top_k or vocab]
    if params.top_p < 1:
        total, mass = sum(weights[i] for i in order), 0
        wanted = max(1, math.ceil(params.top_p * float(total)))
        for kept, i in enumerate(order):
            mass += weights[i]
            if mass >= wanted:
                order = order[: kept + 1]
                break
    largest = float(row.max())
    kept = [(i, (float(row[i]) - largest) / params.temperature) for i in order]
    return winner([(i, score) for i, score in kept if score > -math.inf], seed, position)


ANY_TIME = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="powers of the GPU are not numpy's")
@ANY_TIME
@given(
    row=logit_rows,
    temperature=st.sampled_from([1e-6, 0.2, 1.0, 3.0, 100.0]),
    top_k=st.integers(0, 90),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)
def test_the_token_is_the_defined_one(
    backend, row, temperature, top_k, top_p, seed, position
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = defined(np.array(row, np.float32), params, seed, position)
    assert draw(backend, torch.tensor([row]), params, [seed], [position]) == [expected]


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="powers of the GPU are not numpy's")
@pytest.mark.parametrize(("listed", "searched"), [(8192, 512), (16, 4096)])
def test_long_rows_draw_the_defined_token_from_a_list_and_without(
    backend, listed: int, searched: int, monkeypatch
) -> None:
    monkeypatch.setattr(sampling, "LISTED", listed)
    monkeypatch.setattr(sampling, "SEARCHED", searched)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5001, generator=generator) * 2.5
    logits[3:] = (4 * logits[3:]).round() / 4
    logits[:, 100:200] = -math.inf
    limits = [(50, 1.0), (0, 0.3), (0, 1.0), (20, 0.95), (0, 0.1), (300, 0.99)]
    params = [SamplingParams(top_k=k, top_p=p, temperature=0.8) for k, p in limits]
    seeds = torch.randint(0, 2**62, (6,), generator=generator).tolist()
    expected = [defined(logits[i].numpy(), params[i], seeds[i], i) for i in range(len(params))]
    assert draw(backend, logits, params, seeds) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab", [1, 7, 33, 8192])
def test_the_tokens_are_those_of_the_reference(backend, vocab: int) -> None:
    check_against_the_reference(backend, vocab, 12)


FILTERS = [
    SamplingParams(min_p=0.2),
    SamplingParams(typical_p=0.4, temperature=2.0),
    SamplingParams(top_k=5, top_p=0.8, min_p=0.1, typical_p=0.7, temperature=1.5),
    SamplingParams(top_k=5, top_p=0.8),
    SamplingParams(),
    GREEDY,
]


def test_rows_that_are_filtered_change_nothing_for_the_others(backend, monkeypatch) -> None:
    monkeypatch.setattr(filters, "ROWS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(6)
    count = 4 * len(FILTERS)
    logits = torch.randn(count, 40, generator=generator) * 2
    params = FILTERS * 4
    seeds = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    expected = draw(REFERENCE, logits, params, seeds)
    assert draw(backend, logits, params, seeds) == expected
    others = [i for i in range(count) if i % len(FILTERS) > 2]
    alone = draw(
        backend, logits[others], [params[i] for i in others], [seeds[i] for i in others], others
    )
    assert alone == [expected[i] for i in others]


@ANY_TIME
@given(
    row=logit_rows,
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(0, 90),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
)
def test_what_is_filtered_out_is_what_the_definition_leaves_out(
    backend, row, temperature, top_k, top_p, min_p, typical_p
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )
    assume(min_p > 0 or typical_p < 1)
    assume(distinct(row, params))
    given = temperature, top_k, top_p, min_p, typical_p
    tensors = [
        backend.place(torch.tensor([value], dtype=None if value is top_k else torch.float64))
        for value in given
    ]
    left, top_ks, top_ps = filters.filtered(backend.place(torch.tensor([row])), *tensors)
    kept = {i for i, weight in ranking(row, params) if weight > 0}
    assert set(torch.nonzero(left[0] > -math.inf).flatten().tolist()) == kept
    assert (top_ks.tolist(), top_ps.tolist()) == ([0], [1])


@pytest.mark.more
@pytest.mark.parametrize("vocab", [151_936, pytest.param(262_144, marks=pytest.mark.slow)])
def test_vocabularies_of_today_give_the_tokens_of_the_reference(backend, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    count = 5
    logits = torch.randn(count, vocab, generator=generator) * 3
    params = every_kind_of_params(count)
    seeds = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    assert draw(backend, logits, params, seeds) == draw(REFERENCE, logits, params, seeds)


def test_more_columns_than_whole_numbers_can_sum_are_refused(backend) -> None:
    assert MAX_VOCAB * 2**40 < 2**63
    logits = torch.zeros(1, 1, device=backend.device).expand(1, MAX_VOCAB + 1)
    with pytest.raises(ValueError, match="logits must have at most 4194304 columns"):
        draw(backend, logits, GREEDY)


@pytest.mark.more
@pytest.mark.parametrize("vocab", [7, pytest.param(4100, marks=pytest.mark.slow)])
def test_a_row_draws_the_same_token_alone_in_any_order_and_on_any_strides(
    backend, vocab: int
) -> None:
    check_a_row_among_others(backend, vocab, 6)


@pytest.mark.more
@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(), 60),
        pytest.param(
            SamplingParams(top_k=5, top_p=0.8, temperature=1.5), 30, marks=pytest.mark.slow
        ),
    ],
    ids=["all tokens", "some tokens"],
)
def test_draws_follow_the_exact_probabilities(backend, params: SamplingParams, count: int) -> None:
    row = torch.randn(8, generator=torch.Generator().manual_seed(3))
    tokens = draw(backend, row.expand(count, -1), params, [5] * count, list(range(count)))
    kept = ranking(row.tolist(), params)
    expected = np.array([weight for _, weight in kept])
    expected *= count / expected.sum()
    observed = np.bincount(tokens, minlength=8)[[i for i, _ in kept]]
    assert observed.sum() == count, "a token outside the kept set was drawn"
    assert ((observed - expected) ** 2 / expected).sum() < 30  # p < 1e-4 at 7 degrees of freedom


@ANY_TIME
@given(rows=coarse_rows)
def test_greedy_takes_the_lowest_id_among_the_largest(backend, rows: list[list[float]]) -> None:
    check_greedy(backend, rows)


def test_equals_in_different_blocks_and_lines_give_the_lowest_id(backend) -> None:
    logits = torch.zeros(4, 20_000)
    for row, ids in enumerate([(19_999, 5), (700, 18_000), (131, 130), (12_345, 6_000)]):
        logits[row, list(ids)] = 3.0
    assert draw(backend, logits, GREEDY) == [5, 700, 130, 6_000]


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_keeping_one_token_is_greedy(backend, params: SamplingParams) -> None:
    check_keeping_one_token(backend, params, 6)


@pytest.mark.parametrize("temperature", [5e-324, 1e-6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(backend, temperature, limits) -> None:
    check_a_tiny_temperature(backend, SamplingParams(temperature=temperature, **limits), 4)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(backend) -> None:
    check_the_nucleus(backend, 5)


def test_top_k_comes_before_top_p(backend) -> None:
    check_top_k_before_top_p(backend, 5)


# More candidates than a list holds are searched in the row, which takes the interpreter long.
@pytest.mark.parametrize(
    ("vocab", "positions"),
    [(100, (0, 1, 2, 3, 17, 23)), pytest.param(20_000, (0, 23), marks=pytest.mark.slow)],
)
def test_among_equal_logits_lower_ids_are_kept(
    backend, vocab: int, positions: Sequence[int]
) -> None:
    check_equal_logits(backend, vocab, positions)


def test_fewer_finite_logits_than_top_k_are_all_that_is_kept(backend) -> None:
    logits = torch.full((7, 5000), -math.inf)
    logits[:, [3, 4000, 4999]] = 1.0
    assert set(draw(backend, logits, SamplingParams(top_k=50))) == {3, 4000, 4999}


@pytest.mark.more
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_reported_and_disturbs_no_other(backend, bad: float) -> None:
    check_a_bad_row(backend, bad, [2], 12)


def test_a_nan_beside_an_infinity_is_a_nan(backend) -> None:
    logits = torch.zeros(2, 6000)
    logits[0, 0], logits[0, 5999] = math.inf, math.nan
    logits[1, 0], logits[1, 1] = math.nan, math.inf
    result = sample(backend, logits, [GREEDY, SamplingParams()], [0, 0], [0, 0])
    assert set(result.row_errors.values()) == {"the logits have a NaN"}
    assert len(result.row_errors) == 2


def test_logits_are_left_as_they_were(backend) -> None:
    check_logits_stay(backend, 6)


def test_an_empty_batch_has_no_tokens(backend) -> None:
    check_an_empty_batch(backend)


def test_logits_that_do_not_fit_are_refused(backend) -> None:
    check_logits_that_do_not_fit(backend)


@triton.jit
def exponentials_kernel(seeds, positions, token_ids, out):
    row = tl.program_id(0)
    token = tl.load(token_ids + row)
    tl.store(out + row, exponential(tl.load(seeds + row), tl.load(positions + row), token))


def test_the_noise_is_that_of_the_reference(backend) -> None:
    generator = np.random.default_rng(0)
    seeds, positions = generator.integers(0, 2**64, (2, 60), np.uint64)
    seeds[:4], positions[:4] = [0, 2**64 - 1, 2**32, 1], [0, 2**64 - 1, 2**32 - 1, 1 << 63]
    ids = generator.integers(0, MAX_VOCAB, 60, np.int32)
    ids[:4] = 0, 63, 64, MAX_VOCAB - 1
    out = torch.empty(60, dtype=torch.float64, device=backend.device)
    keys, at = (backend.place(torch.from_numpy(a.view(np.int64))) for a in (seeds, positions))
    exponentials_kernel[(60,)](keys, at, backend.place(torch.from_numpy(ids)), out)
    expected = [
        exponentials(int(seed), int(position), np.array([token], np.int64))[0]
        for seed, position, token in zip(seeds, positions, ids, strict=True)
    ]
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-14)
