"""Rotary embedding and the write into pages on the GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.ops import Backend
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.contents import contents
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.rotary_scenes import (
    RELATIVE,
    check,
    check_a_token_beside_others,
    check_arguments_that_do_not_fit,
    check_positions_outside,
    write,
)
from tests.ops.scenarios import REFERENCE, Heads, lay_out, random
from tests.tiers import examples

round_bfloat16_to_nearest()

DTYPES = list(RELATIVE)
MIXED = [(1, 1, 1), (2, 3, 30), (3, 1, 65), (4, 2, 77)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gpu() -> Backend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("half", [None, 8, 20, 32])
@dtypes
def test_queries_and_pages_agree_and_other_locations_keep_their_bits(
    dtype: torch.dtype, half: int | None, norms: bool
) -> None:
    heads = Heads(8, 4, 64)
    check(gpu(), lay_out(MIXED, heads, dtype=dtype), heads, half=half, norms=norms, dtype=dtype)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 5, 16, 64]), dtype=st.sampled_from(DTYPES))
def test_any_shape_agrees(data: st.DataObject, page_size: int, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(2, 256))
    kv_heads = data.draw(st.integers(1, 3))
    heads = Heads(kv_heads * data.draw(st.integers(1, 5)), kv_heads, dim)
    half = data.draw(st.integers(1, dim // 2) | st.none())
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    drawn = {name: data.draw(st.booleans(), name) for name in ("norms", "interleaved", "scaled")}
    dropped = data.draw(st.integers(0, 17), "dropped")
    check(gpu(), scenario, heads, half=half, dtype=dtype, dropped=dropped, **drawn)


@dtypes
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    check_a_token_beside_others(gpu(), dtype, 5)


def test_rows_of_a_wider_matrix_are_taken_as_they_lie() -> None:
    heads, backend = Heads(2, 1, 16), gpu()
    scenario = lay_out([(1, 3, 40)], heads)
    qkv = random(3, 4, 16, seed=4)
    step = scenario.on(backend, qkv=qkv)
    wide = backend.place(torch.full((3, 100), 7.0))
    wide[:, 20:84] = backend.place(qkv.flatten(1))
    backend.rotary_kv_write(wide[:, 20:84], step.at, None, None)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 84:] == 7).all()
    expected = contents(write(REFERENCE, scenario, qkv, heads, None, False).kv)
    torch.testing.assert_close(contents(step.kv).cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_positions_outside_are_refused_before_anything_is_written() -> None:
    check_positions_outside(gpu())


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    check_arguments_that_do_not_fit(gpu())


def test_a_batch_that_another_backend_prepared_is_refused() -> None:
    scenario, qkv = lay_out([(1, 2, 40)], Heads(2, 1, 16)), random(2, 4, 16)
    step, other = scenario.on(gpu(), qkv=qkv), scenario.on(REFERENCE, qkv=qkv)
    at = step.at._replace(batch=other.batch)
    with pytest.raises(TypeError, match="batch must be one that this backend prepared"):
        gpu().rotary_kv_write(gpu().place(step.qkv), at, None, None)
