"""Rotary embedding and the write into pages, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import KVCache, native, reference
from tests.ops.scenarios import DTYPES, Heads, Scenario, lay_out, random

MIXED = [(1, 1, 1), (2, 30, 30), (3, 1, 65), (4, 5, 77)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tables(rows: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows)[:, None] * 0.7 ** torch.arange(half)
    return angles.cos(), angles.sin()


def write(
    backend: object, scenario: Scenario, qkv: Tensor, heads: Heads, half: int | None, norms: bool
) -> tuple[Tensor, Tensor]:
    """Runs a backend on copies; returns the queries and the storage that it left."""
    wide = qkv.dtype
    qkv = qkv.clone()
    cache = KVCache(scenario.cache.storage.to(wide, copy=True))
    q, k, v = qkv.split([heads.q, heads.kv, heads.kv], dim=1)
    cos, sin = tables(100, half) if half else (None, None)
    kept = k.clone(), v.clone()
    options = {}
    if norms:
        options = {
            "q_norm": random(heads.dim, dtype=scenario.q.dtype, seed=8).to(wide),
            "k_norm": random(heads.dim, dtype=scenario.q.dtype, seed=9).to(wide),
            "eps": 1e-6,
            "weight_offset": 1.0,
        }
    backend.rotary_kv_write(q, k, v, cos, sin, scenario.batch, *cache.layer(0), **options)  # type: ignore[attr-defined]
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])
    return q, cache.storage


def check(
    scenario: Scenario, heads: Heads, *, half: int | None, norms: bool, dtype: torch.dtype
) -> None:
    qkv = random(scenario.q.shape[0], heads.q + 2 * heads.kv, heads.dim, dtype=dtype, seed=4)
    q, storage = write(native, scenario, qkv, heads, half, norms)
    wide_q, wide_storage = write(reference, scenario, qkv.double(), heads, half, norms)
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (2**-8, 1e-4)
    torch.testing.assert_close(q.double(), wide_q, rtol=rtol, atol=atol)
    torch.testing.assert_close(storage.double(), wide_storage, rtol=rtol, atol=atol, equal_nan=True)
    page_size = scenario.cache.page_size
    slots = scenario.batch.token_locations
    written = torch.zeros(scenario.cache.num_pages, page_size, dtype=torch.bool)
    written[slots // page_size, slots % page_size] = True
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    before = scenario.cache.storage.movedim(3, 4)[:, :, ~written].view(bits)
    assert torch.equal(storage.movedim(3, 4)[:, :, ~written].view(bits), before)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("half", [None, 8, 20, 32])
@dtypes
def test_queries_and_pages_agree_and_other_slots_keep_their_bits(
    isa: str, dtype: torch.dtype, half: int | None, norms: bool
) -> None:
    heads = Heads(8, 4, 64)
    check(lay_out(MIXED, heads, dtype=dtype), heads, half=half, norms=norms, dtype=dtype)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 16, 64]), dtype=st.sampled_from(DTYPES))
def test_any_shape_agrees(data: st.DataObject, page_size: int, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(2, 256))
    heads = Heads(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)), dim)
    half = data.draw(st.integers(1, dim // 2) | st.none())
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    check(scenario, heads, half=half, norms=data.draw(st.booleans()), dtype=dtype)


@dtypes
def test_a_token_does_not_depend_on_its_neighbours_or_on_threads(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    heads = Heads(8, 4, 64)
    scenario = lay_out([(1, 90, 90)], heads, dtype=dtype)
    qkv = random(90, 16, 64, dtype=dtype)
    _native.set_num_threads(3)
    q, storage = write(native, scenario, qkv, heads, 32, True)
    _native.set_num_threads(1)
    last = lay_out([(1, 1, 90)], heads, dtype=dtype)
    q_alone, alone = write(native, last, qkv[-1:], heads, 32, True)
    assert torch.equal(q[-1:], q_alone)
    slot = int(last.batch.token_locations[0])
    at = (0, slice(None), slot // 16, slice(None), slot % 16)
    assert torch.equal(storage[at], alone[at])


def test_slots_and_positions_outside_are_refused_before_anything_is_written() -> None:
    heads = Heads(2, 1, 16)
    scenario = lay_out([(1, 2, 40)], heads)
    q, k, v = random(2, 4, 16).split([2, 1, 1], dim=1)
    cos, sin = tables(39, 8)
    before = q.clone(), scenario.cache.storage.clone()
    pages = scenario.pages
    with pytest.raises(ValueError, match=r"batch.positions\[1\] is 39, but cos has 39 rows"):
        native.rotary_kv_write(q, k, v, cos, sin, scenario.batch, *pages)
    scenario.batch.token_locations[1] = -1
    with pytest.raises(ValueError, match=r"batch.token_locations\[1\] is -1, outside the 80 slots"):
        native.rotary_kv_write(q, k, v, None, None, scenario.batch, *pages)
    assert torch.equal(q, before[0])
    torch.testing.assert_close(scenario.cache.storage, before[1], rtol=0, atol=0, equal_nan=True)


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    heads = Heads(2, 1, 16)
    scenario = lay_out([(1, 2, 40)], heads)
    q, k, v = random(2, 4, 16).split([2, 1, 1], dim=1)
    cos, sin = tables(50, 8)
    batch, pages = scenario.batch, scenario.pages
    with pytest.raises(ValueError, match="cos and sin must be both given or both None"):
        native.rotary_kv_write(q, k, v, cos, None, batch, *pages)
    with pytest.raises(TypeError, match=r"k must be torch.float32 like q"):
        native.rotary_kv_write(q, k.bfloat16(), v, cos, sin, batch, *pages)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 1, 16\)"):
        native.rotary_kv_write(q, k, v[:1], cos, sin, batch, *pages)
    with pytest.raises(ValueError, match="cos must have at most 8 columns, got 9"):
        native.rotary_kv_write(q, k, v, *tables(50, 9), batch, *pages)
    with pytest.raises(ValueError, match="q_norm must be a contiguous CPU tensor"):
        native.rotary_kv_write(q, k, v, cos, sin, batch, *pages, q_norm=random(15))
