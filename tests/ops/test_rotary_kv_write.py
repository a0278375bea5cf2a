"""Rotary embedding and the write into pages on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops import Backend
from tests.ops.rotary_scenes import (
    check,
    check_a_token_beside_others,
    check_arguments_that_do_not_fit,
    check_positions_outside,
)
from tests.ops.scenarios import BACKENDS, DTYPES, NATIVE, Heads, lay_out
from tests.tiers import examples

MIXED = [(1, 1, 1), (2, 30, 30), (3, 1, 65), (4, 5, 77)]
ATOL = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("half", [None, 8, 20, 32])
@dtypes
def test_queries_and_pages_agree_and_other_locations_keep_their_bits(
    isa: str, dtype: torch.dtype, half: int | None, norms: bool
) -> None:
    heads = Heads(8, 4, 64)
    scenario = lay_out(MIXED, heads, dtype=dtype)
    check(NATIVE, scenario, heads, half=half, norms=norms, dtype=dtype, atol=ATOL[dtype])


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 5, 16, 64]), dtype=st.sampled_from(DTYPES))
def test_any_shape_agrees(data: st.DataObject, page_size: int, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(2, 256))
    kv_heads = data.draw(st.integers(1, 3))
    heads = Heads(kv_heads * data.draw(st.integers(1, 4)), kv_heads, dim)
    half = data.draw(st.integers(1, dim // 2) | st.none())
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    drawn = {name: data.draw(st.booleans(), name) for name in ("norms", "interleaved", "scaled")}
    dropped = data.draw(st.integers(0, 17), "dropped")
    check(
        NATIVE, scenario, heads, half=half, dtype=dtype, atol=ATOL[dtype], dropped=dropped, **drawn
    )


@dtypes
def test_a_token_does_not_depend_on_its_neighbours_or_on_threads(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    _native.set_num_threads(3)
    check_a_token_beside_others(NATIVE, dtype, 90, before_alone=lambda: _native.set_num_threads(1))


@backends
def test_positions_outside_are_refused_before_anything_is_written(backend: Backend) -> None:
    check_positions_outside(backend)


@backends
def test_arguments_that_do_not_fit_are_refused_by_name(backend: Backend) -> None:
    check_arguments_that_do_not_fit(backend)
