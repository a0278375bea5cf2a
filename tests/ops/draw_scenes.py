"""Checks of token draws that every backend must pass.

Tests choose the backend and the number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from aioserve.ops import Backend, Drawn
from aioserve.ops.philox import exponentials
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable
from tests.ops.scenarios import REFERENCE

GREEDY = SamplingParams(temperature=0)

# Few distinct values make ties frequent. A mask leaves -inf.
coarse = st.sampled_from([-math.inf, -30.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 1.0, 2.0])
fine = st.floats(-20, 20, width=32)
logit_rows = st.one_of(
    st.lists(coarse, min_size=1, max_size=80), st.lists(fine, min_size=1, max_size=80)
).filter(lambda row: max(row) > -math.inf)
coarse_rows = st.lists(
    st.lists(coarse, min_size=9, max_size=9).filter(lambda row: max(row) > -math.inf),
    min_size=1,
    max_size=5,
)


def sample(
    backend: Backend,
    logits: torch.Tensor,
    params: list[SamplingParams],
    seeds: list[int],
    positions: list[int],
) -> Drawn:
    """Draw a token for each row, and check that row i changes only slot i."""
    last_tokens = backend.allocate_slots(len(params) + 1)
    last_tokens[:] = -7
    slots = SlotTable(len(params))
    for slot, (each, seed) in enumerate(zip(params, seeds, strict=True)):
        slots.start(slot, each, seed)
    rows = slots.rows(range(len(params)), positions)
    drawn = backend.draw(backend.place(logits), rows, last_tokens)
    assert drawn.token_ids.dtype == torch.int64
    assert last_tokens.tolist() == [*drawn.token_ids.tolist(), -7]
    return drawn


def draw(
    backend: Backend,
    logits: torch.Tensor,
    params: SamplingParams | list[SamplingParams],
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
) -> list[int]:
    """Draw a token for each row. Default seeds are 0, default positions the rows' indices."""
    rows = range(logits.shape[0])
    each = params if isinstance(params, list) else [params for _ in rows]
    drawn = sample(backend, logits, each, seeds or [0 for _ in rows], positions or list(rows))
    assert drawn.row_errors == {}
    return drawn.token_ids.tolist()


def every_kind_of_params(count: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(),
        GREEDY,
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7, temperature=0.6),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_p=0.99, temperature=5.0),
        SamplingParams(min_p=0.05, temperature=1.4),
        SamplingParams(typical_p=0.8),
        SamplingParams(top_k=50, top_p=0.95, min_p=0.02, typical_p=0.6, temperature=1.3),
        SamplingParams(top_p=0.98, min_p=0.01, temperature=2.0),
        SamplingParams(top_k=30, typical_p=0.3),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def ranking(row: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """Return kept ids and their unnormalised probabilities in rank order, by the definition."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    scores = {i: (row[i] - row[order[0]]) / params.temperature for i in order}
    weights = {i: math.exp(score) for i, score in scores.items()}
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        order = order[: _reaching([weights[i] for i in order], params.top_p)]
    if params.min_p:
        order = [i for i in order if weights[i] >= params.min_p]
    if params.typical_p < 1:
        order = [i for i in order if weights[i] > 0]
        total = sum(weights[i] for i in order)
        surprise = {i: math.log(total) - scores[i] for i in order}
        entropy = sum(surprise[i] * weights[i] / total for i in order)
        nearest = sorted(order, key=lambda i: abs(surprise[i] - entropy))
        last = nearest[_reaching([weights[i] for i in nearest], params.typical_p) - 1]
        widest = abs(surprise[last] - entropy)
        order = [i for i in order if abs(surprise[i] - entropy) <= widest]
    return [(i, weights[i]) for i in order]


def _reaching(weights: list[float], share: float) -> int:
    """Number of first weights that sum to this share of all."""
    mass, total = 0.0, sum(weights)
    for count, weight in enumerate(weights, 1):
        mass += weight
        if mass >= share * total:
            return count
    return len(weights)


def winner(kept: Sequence[tuple[int, float]], seed: int, position: int) -> int:
    """Return the winner of the race among kept ids, by logits divided by the temperature."""
    ids = sorted(i for i, _ in kept)
    scaled = dict(kept)
    noise = exponentials(seed, position, np.array(ids)).tolist()
    return min(ids, key=lambda i: math.log(noise[ids.index(i)]) - scaled[i])


def distinct(row: list[float], params: SamplingParams) -> bool:
    """True if float32 rounding can't move a token across a border of the kept ones."""
    top_k = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    top_p = msgspec.structs.replace(top_k, top_p=params.top_p)
    min_p = msgspec.structs.replace(top_p, min_p=params.min_p)
    if params.top_p < 1:
        ends = np.cumsum([weight for _, weight in ranking(row, top_k)])
        if np.abs(ends / ends[-1] - params.top_p).min() < 1e-5:
            return False
    weights = np.array([weight for _, weight in ranking(row, top_p)])
    if params.min_p and np.abs(weights / params.min_p - 1).min() < 1e-5:
        return False
    if params.typical_p < 1:
        left = [(i, weight) for i, weight in ranking(row, min_p) if weight > 0]
        p = np.array([weight for _, weight in left])
        p /= p.sum()
        distance = np.abs(-np.log(p) + (p * np.log(p)).sum())
        order = np.argsort(distance, kind="stable")
        ends = p[order].cumsum()
        if np.abs(ends - params.typical_p).min() < 1e-5:
            return False
        last = order[int((ends < params.typical_p).sum())]
        logits = np.array([row[i] for i, _ in left])
        if (logits != logits[last])[np.abs(distance - distance[last]) < 1e-4].any():
            return False
    return True


def check_against_the_reference(backend: Backend, vocab: int, num_rows: int) -> None:
    """Compare draws with the reference, with ties and with masked tokens."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    logits[::7] = logits[::7].round()
    logits[:, vocab // 2 :: 5] = -math.inf
    logits[:, 0] = 0.5
    params = every_kind_of_params(num_rows)
    seeds = torch.randint(0, 2**62, (num_rows,), generator=generator).tolist()
    assert draw(backend, logits, params, seeds) == draw(REFERENCE, logits, params, seeds)


def check_a_row_among_others(backend: Backend, vocab: int, num_rows: int) -> None:
    """Check that a row draws the same token alone, in any order and with any strides."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    params = every_kind_of_params(num_rows)
    seeds = torch.randint(0, 2**62, (num_rows,), generator=generator).tolist()
    positions = torch.randint(0, 2**31, (num_rows,), generator=generator).tolist()
    together = draw(backend, logits, params, seeds, positions)

    alone = [
        draw(backend, logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]])[0]
        for i in range(num_rows)
    ]
    assert alone == together

    order = torch.randperm(num_rows, generator=generator).tolist()
    shuffled = draw(
        backend,
        logits[order],
        [params[i] for i in order],
        [seeds[i] for i in order],
        [positions[i] for i in order],
    )
    assert shuffled == [together[i] for i in order]

    wide = torch.full((num_rows * 2, vocab + 3), math.nan)
    wide[::2, 1 : vocab + 1] = logits
    wide = backend.place(wide)
    assert draw(backend, wide[::2, 1 : vocab + 1], params, seeds, positions) == together
    columns = backend.place(logits.t().contiguous()).t()
    assert draw(backend, columns, params, seeds, positions) == together


def check_greedy(backend: Backend, rows: list[list[float]]) -> None:
    """Check that greedy draws take the lowest id among the largest logits."""
    assert draw(backend, torch.tensor(rows), GREEDY) == [row.index(max(row)) for row in rows]


def check_keeping_one_token(backend: Backend, params: SamplingParams, num_rows: int) -> None:
    """Check that parameters which keep one token draw greedily."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 5, (num_rows, 300), generator=generator).float()
    assert draw(backend, logits, params) == draw(backend, logits, GREEDY)


def check_a_tiny_temperature(backend: Backend, params: SamplingParams, num_rows: int) -> None:
    """Check that a tiny temperature draws greedily, without overflow."""
    logits = torch.randn(num_rows, 2000, generator=torch.Generator().manual_seed(1)) * 50
    logits[:, 100] = -math.inf
    logits[3, 5] = 3e38
    logits[3, 6] = -3e38
    assert draw(backend, logits, params) == draw(backend, logits, GREEDY)


def check_the_nucleus(backend: Backend, num_rows: int) -> None:
    """Check that top_p keeps the smallest set that reaches it."""
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2])).expand(num_rows, -1)
    for top_p, kept in ((0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3})):
        assert set(draw(backend, logits, SamplingParams(top_p=top_p))) == kept


def check_top_k_before_top_p(backend: Backend, num_rows: int) -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2])).expand(num_rows, -1)
    # The first of the two tokens that top_k keeps has 4/7 of their weight.
    assert set(draw(backend, logits, SamplingParams(top_k=2, top_p=0.55))) == {1}
    assert set(draw(backend, logits, SamplingParams(top_k=2, top_p=0.6))) == {1, 2}


def check_equal_logits(backend: Backend, vocab: int, positions: Sequence[int]) -> None:
    """Check that the 7 lowest ids of equal logits are kept, and drawn evenly.

    The first and the last kept id must win at some of the rows' `positions`."""
    logits = torch.zeros(len(positions), vocab)
    logits[:, ::3] = -0.0
    expected = [int(exponentials(0, at, np.arange(7)).argmin()) for at in positions]
    assert {0, 6} <= set(expected)
    for params in (SamplingParams(top_k=7), SamplingParams(top_p=6.5 / vocab)):
        assert draw(backend, logits, params, positions=list(positions)) == expected


def check_a_bad_row(backend: Backend, bad: float, bad_rows: Sequence[int], num_rows: int) -> None:
    """Check that a bad row is reported, and changes no other row.

    `bad_rows` are in the first half, and tried one at a time. Each has a second bad row, half the
    number of rows later."""
    logits = torch.randn(num_rows, 500, generator=torch.Generator().manual_seed(2))
    params = every_kind_of_params(num_rows)
    healthy = draw(backend, logits, params)
    reason = "the logits have a NaN" if math.isnan(bad) else "the logits have an infinity"
    for row in bad_rows:
        other = row + num_rows // 2
        broken = logits.clone()
        broken[row, 400] = bad
        broken[other] = -math.inf
        result = sample(backend, broken, params, [0] * num_rows, list(range(num_rows)))
        assert result.row_errors == {row: reason, other: "all logits are -inf"}
        for i in range(num_rows):
            assert result.token_ids[i] == (0 if i in result.row_errors else healthy[i])


def check_logits_stay(backend: Backend, num_rows: int) -> None:
    """Check that draws leave the logits unchanged."""
    logits = backend.place(torch.randn(num_rows, 700))
    before = logits.clone()
    draw(backend, logits, every_kind_of_params(num_rows))
    assert torch.equal(logits, before)


def check_an_empty_batch(backend: Backend) -> None:
    assert draw(backend, torch.empty(0, 10), []) == []


def check_logits_that_do_not_fit(backend: Backend) -> None:
    """Check that logits of a wrong shape or dtype are refused."""
    wrong = torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2)
    for logits in (*wrong, torch.zeros(2, 0)):
        with pytest.raises(ValueError, match=r"logits must be float32 of shape \[2, V\]"):
            sample(backend, logits, [GREEDY] * 2, [0] * 2, [0] * 2)
