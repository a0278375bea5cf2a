"""Tokens from logits: the right set, the right distribution, and nothing else matters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.ops import Backend, Drawn, draws
from aioserve.ops.philox import uniforms
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE

GREEDY = SamplingParams(temperature=0)
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    seeds: list[int],
    positions: list[int],
    backend: Backend = NATIVE,
) -> Drawn:
    """Row i leaves its token in slot i."""
    last_tokens = backend.allocate_slots(len(params))
    slots = SlotTable(len(params))
    for slot, (each, seed) in enumerate(zip(params, seeds, strict=True)):
        slots.start(slot, each, seed)
    rows = slots.rows(range(len(params)), positions)
    drawn = backend.draw(logits, rows, last_tokens)
    assert torch.equal(last_tokens, drawn.token_ids)
    return drawn


def draw(
    logits: torch.Tensor,
    params: SamplingParams | list[SamplingParams],
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    backend: Backend = NATIVE,
) -> list[int]:
    rows = range(logits.shape[0])
    each = params if isinstance(params, list) else [params for _ in rows]
    result = sample(logits, each, seeds or [0 for _ in rows], positions or list(rows), backend)
    assert result.row_errors == {}
    assert result.token_ids.dtype == torch.int64
    return result.token_ids.tolist()


def ranking(row: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """Kept ids and their unnormalised probabilities in rank order, by the definition."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((row[i] - row[order[0]]) / params.temperature) for i in order]
    if params.top_p < 1:
        mass, total = 0.0, sum(weights)
        for kept, weight in enumerate(weights):
            mass += weight
            if mass >= params.top_p * total:
                return list(zip(order[: kept + 1], weights, strict=False))
    return list(zip(order, weights, strict=True))


# Few distinct values, so that ties are the rule; -inf as a mask leaves it.
coarse = st.sampled_from([-math.inf, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0])
fine = st.floats(-20, 20, width=32)
logit_rows = st.one_of(
    st.lists(coarse, min_size=1, max_size=80), st.lists(fine, min_size=1, max_size=80)
).filter(lambda row: max(row) > -math.inf)


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
        assert draw(torch.tensor([row]), params, [seed], [position]) == [expected]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_SORTED_AT_ONCE", 0)
        patch.setattr(draws, "_BUCKETS", buckets)
        check()


@given(
    row=logit_rows, temperature=st.sampled_from([1e-6, 0.3, 1.0, 100.0]), seed=st.integers(0, 99)
)
def test_an_unrestricted_draw_has_a_weight(row: list[float], temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature)
    (token,) = draw(torch.tensor([row]), params, [seed])
    assert row[token] > -math.inf
    assert (row[token] - max(row)) / temperature > -120


def chi_square(row: torch.Tensor, params: SamplingParams, count: int, seed: int) -> float:
    """Normal deviate of Pearson's statistic of `count` draws (Wilson and Hilferty, 1931)."""
    tokens = draw(row.expand(count, -1), params, [seed] * count, list(range(count)))
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
        row.expand(count, -1), SamplingParams(), list(range(count)), [17] * count, backend=backend
    )
    expected = torch.softmax(row.double(), 0).numpy() * count
    observed = np.bincount(tokens, minlength=50)
    assert ((observed - expected) ** 2 / expected).sum() < 100  # p < 1e-4 at 49 degrees


def every_kind_of_params(count: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(),
        GREEDY,
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7, temperature=0.6),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_p=0.99, temperature=5.0),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


@pytest.mark.parametrize("vocab", [1, 7, 1000, 8192, 40_001])
def test_a_row_draws_the_same_token_alone_in_any_order_and_on_any_strides(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    count = 24
    logits = torch.randn(count, vocab, generator=generator) * 2
    params = every_kind_of_params(count)
    seeds = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    positions = torch.randint(0, 2**31, (count,), generator=generator).tolist()
    together = draw(logits, params, seeds, positions)

    alone = [
        draw(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]])[0] for i in range(count)
    ]
    assert alone == together

    order = torch.randperm(count, generator=generator).tolist()
    shuffled = draw(
        logits[order],
        [params[i] for i in order],
        [seeds[i] for i in order],
        [positions[i] for i in order],
    )
    assert shuffled == [together[i] for i in order]

    wide = torch.full((count * 2, vocab + 3), math.nan)
    wide[::2, 1 : vocab + 1] = logits
    assert draw(wide[::2, 1 : vocab + 1], params, seeds, positions) == together
    columns = logits.t().contiguous().t()
    assert draw(columns, params, seeds, positions) == together


@on_every_backend
def test_the_draw_depends_on_the_seed_and_on_the_position(backend: Backend) -> None:
    logits = torch.zeros(1, 5000).expand(200, -1)
    by_seed = draw(logits, SamplingParams(), list(range(200)), [0] * 200, backend=backend)
    by_position = draw(logits, SamplingParams(), [0] * 200, list(range(200)), backend=backend)
    assert len(set(by_seed)) > 180
    assert len(set(by_position)) > 180
    assert by_seed != by_position


@on_every_backend
@settings(max_examples=50)
@given(rows=st.lists(st.lists(coarse, min_size=9, max_size=9), min_size=1, max_size=5))
def test_greedy_takes_the_lowest_id_among_the_largest(
    rows: list[list[float]], backend: Backend
) -> None:
    assume(all(max(row) > -math.inf for row in rows))
    assert draw(torch.tensor(rows), GREEDY, backend=backend) == [
        row.index(max(row)) for row in rows
    ]


@on_every_backend
@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_keeping_one_token_is_greedy(params: SamplingParams, backend: Backend) -> None:
    logits = torch.randint(0, 5, (50, 300), generator=torch.Generator().manual_seed(0)).float()
    assert draw(logits, params, backend=backend) == draw(logits, GREEDY, backend=backend)


@on_every_backend
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(
    temperature: float, limits: dict[str, float], backend: Backend
) -> None:
    logits = torch.randn(20, 2000, generator=torch.Generator().manual_seed(1)) * 50
    logits[:, 100] = -math.inf
    logits[3, 5] = 3e38
    logits[3, 6] = -3e38
    params = SamplingParams(temperature=temperature, **limits)  # pyright: ignore[reportArgumentType]
    assert draw(logits, params, backend=backend) == draw(logits, GREEDY, backend=backend)


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
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2])).expand(400, -1)
    for top_p, kept in ((0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3})):
        assert set(draw(logits, SamplingParams(top_p=top_p), backend=backend)) == kept


@on_every_backend
def test_top_k_comes_before_top_p(backend: Backend) -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2])).expand(400, -1)
    # Of the two kept by top_k the first has 4/7 of the weight.
    assert set(draw(logits, SamplingParams(top_k=2, top_p=0.55), backend=backend)) == {1}
    assert set(draw(logits, SamplingParams(top_k=2, top_p=0.6), backend=backend)) == {1, 2}


@on_every_backend
@pytest.mark.parametrize("vocab", [100, 20_000])
def test_among_equal_logits_lower_ids_are_kept(vocab: int, backend: Backend) -> None:
    logits = torch.zeros(400, vocab)
    assert set(draw(logits, SamplingParams(top_k=7), backend=backend)) == set(range(7))
    assert set(draw(logits, SamplingParams(top_p=6.5 / vocab), backend=backend)) == set(range(7))


@on_every_backend
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_reported_and_disturbs_no_other(bad: float, backend: Backend) -> None:
    count = 24
    logits = torch.randn(count, 500, generator=torch.Generator().manual_seed(2))
    params = every_kind_of_params(count)
    healthy = draw(logits, params, backend=backend)
    for row in (0, 1, 2, 3):
        broken = logits.clone()
        broken[row, 400] = bad
        broken[row + 12] = -math.inf
        result = sample(broken, params, [0] * count, list(range(count)), backend)
        assert sorted(result.row_errors) == [row, row + 12]
        assert "NaN" in result.row_errors[row] or "infinity" in result.row_errors[row]
        assert result.row_errors[row + 12] == "all logits are -inf"
        for i in range(count):
            assert result.token_ids[i] == (0 if i in result.row_errors else healthy[i])


@on_every_backend
def test_logits_are_left_as_they_were(backend: Backend) -> None:
    logits = torch.randn(12, 700)
    before = logits.clone()
    draw(logits, every_kind_of_params(12), backend=backend)
    assert torch.equal(logits, before)


@on_every_backend
def test_an_empty_batch_has_no_tokens(backend: Backend) -> None:
    assert draw(torch.empty(0, 10), [], backend=backend) == []


@pytest.mark.parametrize("vocab", [1, 7, 33, 1000, 8192])
def test_the_reference_draws_the_same_tokens(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    count = 120
    logits = torch.randn(count, vocab, generator=generator) * 2
    logits[::7] = logits[::7].round()
    logits[:, vocab // 2 :: 5] = -math.inf
    logits[:, 0] = 0.5
    params = every_kind_of_params(count)
    seeds = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    assert draw(logits, params, seeds) == draw(logits, params, seeds, backend=REFERENCE)


@on_every_backend
@pytest.mark.parametrize(
    "logits",
    [torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2), torch.zeros(2, 0)],
)
def test_logits_that_do_not_fit_are_refused(logits: torch.Tensor, backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"logits must be float32 of shape \[2, V\]"):
        sample(logits, [GREEDY] * 2, [0] * 2, [0] * 2, backend)


def test_a_slot_that_was_not_started_samples_nothing() -> None:
    slots = SlotTable(3)
    slots.start(1, GREEDY, 0)
    slots.start(2, GREEDY, 0)
    slots.end(2)
    with pytest.raises(InvariantError, match=r"slots \[0, 2\] sample, but have not started"):
        slots.rows([0, 1, 2], [5, 5, 5])
