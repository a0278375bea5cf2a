"""Rotary embedding and the write into pages, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.backend import HeadNorms, Rotation
from tests.ops.scenarios import (
    BACKENDS,
    DTYPES,
    NATIVE,
    REFERENCE,
    Heads,
    Scenario,
    Step,
    lay_out,
    random,
)

MIXED = [(1, 1, 1), (2, 30, 30), (3, 1, 65), (4, 5, 77)]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tables(rows: int, half: int) -> Rotation:
    angles = torch.arange(rows)[:, None] * 0.7 ** torch.arange(half)
    return Rotation(angles.cos(), angles.sin())


def write(
    backend: Backend,
    scenario: Scenario,
    qkv: Tensor,
    heads: Heads,
    half: int | None,
    norms: bool,
    *,
    wide: bool = False,
) -> Step:
    """What a backend leaves of its queries, and in its pages."""
    step = scenario.on(backend, qkv=qkv, wide=wide)
    before = step.qkv[:, step.q_size :].clone()
    given = None
    if norms:
        query, key = (random(heads.dim, dtype=scenario.q.dtype, seed=seed) for seed in (8, 9))
        dtype = step.qkv.dtype
        given = HeadNorms(query.to(dtype), key.to(dtype), 1e-6, 1.0)
    rotation = tables(100, half) if half else None
    backend.rotary_kv_write(step.qkv, step.batch, step.kv, 0, rotation, given)
    assert torch.equal(step.qkv[:, step.q_size :], before)
    return step


def check(
    scenario: Scenario, heads: Heads, *, half: int | None, norms: bool, dtype: torch.dtype
) -> None:
    qkv = random(scenario.q.shape[0], heads.q + 2 * heads.kv, heads.dim, dtype=dtype, seed=4)
    step = write(NATIVE, scenario, qkv, heads, half, norms)
    exact = write(REFERENCE, scenario, qkv, heads, half, norms, wide=True)
    storage = step.kv.plain()
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (2**-8, 1e-4)
    torch.testing.assert_close(step.q.double(), exact.q, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        storage.double(), exact.kv.plain(), rtol=rtol, atol=atol, equal_nan=True
    )
    page_size = scenario.page_size
    slots = torch.from_numpy(scenario.host.token_locations)
    written = torch.zeros(scenario.num_pages, page_size, dtype=torch.bool)
    written[slots // page_size, slots % page_size] = True
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    before = scenario.storage.movedim(3, 4)[:, :, ~written].view(bits)
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
@given(data=st.data(), page_size=st.sampled_from([1, 2, 5, 16, 64]), dtype=st.sampled_from(DTYPES))
def test_any_shape_agrees(data: st.DataObject, page_size: int, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(2, 256))
    kv_heads = data.draw(st.integers(1, 3))
    heads = Heads(kv_heads * data.draw(st.integers(1, 4)), kv_heads, dim)
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
    together = write(NATIVE, scenario, qkv, heads, 32, True)
    _native.set_num_threads(1)
    last = lay_out([(1, 1, 90)], heads, dtype=dtype)
    alone = write(NATIVE, last, qkv[-1:], heads, 32, True)
    assert torch.equal(together.q[-1:], alone.q)
    slot = int(last.host.token_locations[0])
    at = (0, slice(None), slot // 16, slice(None), slot % 16)
    assert torch.equal(together.kv.plain()[at], alone.kv.plain()[at])


@backends
def test_positions_outside_are_refused_before_anything_is_written(backend: Backend) -> None:
    step = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(backend, qkv=random(2, 4, 16))
    before = step.qkv.clone(), step.kv.storage.clone()
    with pytest.raises(ValueError, match="batch: positions go to 39, but cos has 39 rows"):
        backend.rotary_kv_write(step.qkv, step.batch, step.kv, 0, tables(39, 8))
    assert torch.equal(step.qkv, before[0])
    torch.testing.assert_close(step.kv.storage, before[1], rtol=0, atol=0, equal_nan=True)


@backends
def test_arguments_that_do_not_fit_are_refused_by_name(backend: Backend) -> None:
    step = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(backend, qkv=random(2, 4, 16))
    at = step.batch, step.kv
    with pytest.raises(TypeError, match=r"qkv must be torch.float32 as the KV pages"):
        backend.rotary_kv_write(step.qkv.bfloat16(), *at, 0)
    with pytest.raises(ValueError, match=r"qkv must have shape \(2, \(Hq \+ 2 \* 1\) \* 16\)"):
        backend.rotary_kv_write(step.qkv[:, :32], *at, 0)
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got -1"):
        backend.rotary_kv_write(step.qkv, *at, -1)
    with pytest.raises(ValueError, match="cos must have at most 8 columns, got 9"):
        backend.rotary_kv_write(step.qkv, *at, 0, tables(50, 9))
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        backend.rotary_kv_write(step.qkv, *at, 1)
    with pytest.raises(ValueError, match=r"cos must have shape \[positions, R / 2\]"):
        backend.rotary_kv_write(step.qkv, *at, 0, Rotation(*(table[0] for table in tables(50, 8))))
    double = Rotation(*(table.double() for table in tables(50, 8)))
    with pytest.raises(TypeError, match=r"cos must be torch.float32, got torch.float64"):
        backend.rotary_kv_write(step.qkv, *at, 0, double)
    with pytest.raises(ValueError, match=r"sin must be .* of shape \(50, 8\)"):
        backend.rotary_kv_write(step.qkv, *at, 0, Rotation(tables(50, 8).cos, tables(50, 7).sin))
    short = HeadNorms(random(15), random(16), 1e-6)
    with pytest.raises(ValueError, match=r"norms.query must be contiguous, of shape \(16,\)"):
        backend.rotary_kv_write(step.qkv, *at, 0, None, short)
    other = HeadNorms(random(16), random(16).bfloat16(), 1e-6)
    with pytest.raises(TypeError, match=r"norms.key must be torch.float32, got torch.bfloat16"):
        backend.rotary_kv_write(step.qkv, *at, 0, None, other)
