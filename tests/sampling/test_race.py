"""Races: near distributions agree, rare tokens win as often as they should, order doesn't count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.philox import exponentials
from aioserve.request import SamplingParams
from tests.ops.draw_scenes import distinct, draw, ranking
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE
from tests.tiers import examples

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
ISAS = _native.cpu_info()["isas_supported"]


def probabilities(row: list[float], params: SamplingParams) -> npt.NDArray[np.float64]:
    kept = ranking(row, params)
    p = np.zeros(len(row))
    p[[i for i, _ in kept]] = [weight for _, weight in kept]
    return p / p.sum()


@settings(max_examples=examples(60))
@given(
    generator=st.integers(0, 10**6),
    size=st.integers(2, 300),
    shift=st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0]),
    limits=st.sampled_from(
        [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}]
    ),
    seed=st.integers(0, 2**63),
)
def test_distributions_that_are_near_draw_the_same_tokens(
    generator: int, size: int, shift: float, limits: dict[str, Any], seed: int
) -> None:
    """Two distributions draw the same token at least as often as (1 - d) / (1 + d).

    Here d is their distance of total variation (Daliri, Musco and Suresh, 2024). The test allows
    five standard deviations of that many draws.
    """
    params, count = SamplingParams(**limits), 400
    random = np.random.default_rng(generator)
    rows = random.normal(0, 2, size) + shift * random.normal(0, 1, (2, size))
    pair = [row.tolist() for row in rows.astype(np.float32)]
    assume(all(distinct(row, params) for row in pair))
    p, q = (probabilities(row, params) for row in pair)
    distance = np.abs(p - q).sum() / 2
    least = (1 - distance) / (1 + distance)
    first, second = (
        draw(NATIVE, torch.tensor(row).expand(count, -1), params, [seed] * count) for row in pair
    )
    agreement = np.mean(np.array(first) == second)
    assert agreement >= least - 5 * math.sqrt(least * (1 - least) / count) - 1e-9


@on_every_backend
@pytest.mark.parametrize(
    "limits", [{"top_k": 9}, {"top_p": 0.6}, {"typical_p": 0.6}, {"min_p": 0.1}]
)
def test_a_token_that_wins_among_all_wins_wherever_it_is_kept(
    limits: dict[str, Any], backend: Backend
) -> None:
    """Its noise depends neither on the others nor on its rank."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(100, 90, generator=generator) * 2
    seeds = list(range(100))
    winners = draw(backend, logits, SamplingParams(), seeds)
    fewer = logits.where(torch.rand(logits.shape, generator=generator) < 0.5, -math.inf)
    fewer[range(100), winners] = logits[range(100), winners]
    assert draw(backend, fewer, SamplingParams(), seeds) == winners

    params = SamplingParams(**limits)
    drawn = draw(backend, logits, params, seeds)
    kept = [{i for i, _ in ranking(row, params)} for row in logits.tolist()]
    stay = [i for i in range(100) if winners[i] in kept[i]]
    assert 30 < len(stay) < 100
    assert [drawn[i] for i in stay] == [winners[i] for i in stay]


# With seed 0: upper words of 6, 20 and 2**32 - 198 among 2**32.
RARE = [(362, 2880), (398, 8202), (109, 112_343)]


LIMITS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"min_p": 1e-12}]


@on_every_backend
@pytest.mark.parametrize(("position", "token"), RARE)
def test_a_token_wins_up_to_the_gap_that_its_noise_makes_up_for(
    position: int, token: int, backend: Backend
) -> None:
    """Noise is rare here: two values that come a few times in 10**9 draws, and one that loses to
    nearly all. Tokens are drawn from a whole row and from a list of kept ones."""
    noise = exponentials(0, position, np.array([5, token]))
    first, own = np.log(noise).tolist()
    logits = torch.full((2, token + 2), -100.0)
    logits[:, 5] = 3.0
    logits[:, token] = 3.0 + torch.tensor([own - first + 1e-4, own - first - 1e-4])
    for limits in LIMITS:
        params = SamplingParams(**limits)
        assert draw(backend, logits, params, [0, 0], [position] * 2) == [token, 5]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "row",
    [
        torch.linspace(-40, 3, 9001),
        torch.linspace(3, -40, 9001),
        torch.tensor([-math.inf] * 7000 + [0.0, -math.inf, 1.0] + [-math.inf] * 70),
        torch.tensor([-3e38] * 63 + [3e38, 3e38, -math.inf]),
    ],
    ids=["rising", "falling", "mostly left out", "far apart"],
)
def test_where_the_winner_lies_does_not_count(row: torch.Tensor, isa: str) -> None:
    logits = row.expand(30, -1)
    seeds = list(range(30))
    before = _native.cpu_info()["isa"]
    _native.set_isa(isa)
    try:
        for params in (SamplingParams(), SamplingParams(temperature=9, top_p=0.99)):
            assert draw(NATIVE, logits, params, seeds) == draw(REFERENCE, logits, params, seeds)
    finally:
        _native.set_isa(before)


def test_many_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """20,000 tokens have a hundred-thousandth of a percent each."""
    count, rare = 20_000, 20_000
    logits = torch.zeros(rare + 1)
    logits[1:] = math.log(1e-7)
    expected = count * rare * 1e-7 / (1 + rare * 1e-7)
    drawn = 0
    for seed in range(20):
        rows = logits.expand(count // 20, -1)
        tokens = draw(NATIVE, rows, SamplingParams(), [seed] * len(rows))
        drawn += sum(token > 0 for token in tokens)
    assert abs(drawn - expected) < 4.5 * math.sqrt(expected)
