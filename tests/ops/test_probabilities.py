"""Probabilities of tokens are those of the draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops import Backend
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable
from tests.ops.draw_scenes import GREEDY, distinct, draw, every_kind_of_params, logit_rows, ranking
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE
from tests.tiers import examples

ISAS = _native.cpu_info()["isas_supported"]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def probabilities(
    backend: Backend, logits: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    slots = SlotTable(len(params))
    for slot, each in enumerate(params):
        slots.start(slot, each, 0)
    before = logits.clone()
    found = backend.probabilities(logits, slots.rows(range(len(params)), range(len(params))))
    assert torch.equal(logits, before) or before.isnan().any()
    assert (found.dtype, found.shape) == (torch.float32, logits.shape)
    return found


@on_every_backend
@settings(max_examples=examples(150))
@given(
    row=logit_rows,
    limits=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.2, 1.0, 3.0]),
            "top_k": st.integers(0, 90),
            "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
            "min_p": st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
            "typical_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        }
    ),
)
def test_they_are_the_definitions(
    row: list[float], limits: dict[str, Any], backend: Backend
) -> None:
    params = SamplingParams(**limits)
    assume(distinct(row, params))
    kept = ranking(row, params)
    expected = torch.zeros(len(row), dtype=torch.float64)
    for token_id, weight in kept:
        expected[token_id] = weight
    expected /= expected.sum()
    (found,) = probabilities(backend, torch.tensor([row]), [params])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_drawn_is_probable_and_what_is_probable_is_drawn(isa: str) -> None:
    """Rows have many ties, and borders of kept tokens anywhere, on each instruction set."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(22, 40, generator=generator) * 4).round() / 4
    logits[:, ::6] = -math.inf
    params, count = every_kind_of_params(len(logits)), 3000
    before = _native.cpu_info()["isa"]
    _native.set_isa(isa)
    try:
        found = probabilities(NATIVE, logits, params)
        for row, own, each in zip(logits, found, params, strict=True):
            drawn = set(draw(NATIVE, row.expand(count, -1), each))
            assert drawn <= set(own.nonzero()[:, 0].tolist())
            assert drawn >= set((own > 0.01).nonzero()[:, 0].tolist())
    finally:
        _native.set_isa(before)


def test_a_large_vocabulary_is_as_the_reference_has_it() -> None:
    """Candidates are in lists and in whole rows, on several threads."""
    logits = torch.randn(22, 20_000, generator=torch.Generator().manual_seed(1)) * 3
    params = every_kind_of_params(len(logits))
    found, expected = (probabilities(each, logits, params) for each in (NATIVE, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)
    assert np.allclose(found.double().sum(1), 1, atol=1e-5)
    wide = torch.full((44, 20_003), math.nan)
    wide[::2, 1:-2] = logits
    assert torch.equal(probabilities(NATIVE, wide[::2, 1:-2], params), found)


@on_every_backend
def test_a_greedy_row_is_certain_and_a_bad_one_is_nothing(backend: Backend) -> None:
    logits = torch.zeros(5, 9)
    logits[0, [4, 7]] = 1.0
    logits[1, 2] = math.nan
    logits[2, 2] = math.inf
    logits[3] = -math.inf
    found = probabilities(backend, logits, [GREEDY, *[SamplingParams(top_k=3)] * 3, GREEDY])
    expected = torch.zeros(5, 9)
    expected[0, 4] = expected[4, 0] = 1
    assert torch.equal(found, expected)


@on_every_backend
def test_a_tiny_temperature_is_greedy(backend: Backend) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 50
    every: list[dict[str, Any]] = [{}, {"typical_p": 0.5}, {"top_p": 0.9}]
    for limits in every:
        tiny = SamplingParams(temperature=1e-6, **limits)
        found = probabilities(backend, logits, [tiny] * 4)
        assert torch.equal(found, probabilities(backend, logits, [GREEDY] * 4))
