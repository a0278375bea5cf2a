"""Rotary embedding and the write into pages on the GPU, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.ops import Backend
from aioserve.ops.backend import HeadNorms, Rotation
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.scenarios import REFERENCE, Heads, Scenario, Step, lay_out, random

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(1, 1, 1), (2, 3, 30), (3, 1, 65), (4, 5, 77)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gpu() -> Backend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


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
    rows = backend.place(step.qkv)
    given = None
    if norms:
        query, key = (random(heads.dim, dtype=scenario.q.dtype, seed=seed) for seed in (8, 9))
        query, key = (backend.place(weight.to(rows.dtype)) for weight in (query, key))
        given = HeadNorms(query, key, 1e-6, 1.0)
    rotation = None
    if half:
        rotation = Rotation(*(backend.place(table) for table in tables(100, half)))
    before = rows[:, step.q_size :].clone()
    backend.rotary_kv_write(rows, step.batch, step.kv, 0, rotation, given)
    assert torch.equal(rows[:, step.q_size :], before)
    return Step(rows.cpu(), step.batch, step.kv, step.q_size)


def check(
    scenario: Scenario, heads: Heads, *, half: int | None, norms: bool, dtype: torch.dtype
) -> None:
    qkv = random(scenario.q.shape[0], heads.q + 2 * heads.kv, heads.dim, dtype=dtype, seed=4)
    step = write(gpu(), scenario, qkv, heads, half, norms)
    exact = write(REFERENCE, scenario, qkv, heads, half, norms, wide=True)
    storage = step.kv.plain().cpu()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(step.q.double(), exact.q, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(
        storage.double(), exact.kv.plain(), rtol=rtol, atol=1e-5, equal_nan=True
    )
    page_size = scenario.page_size
    locations = torch.from_numpy(scenario.host.token_locations)
    written = torch.zeros(scenario.num_pages, page_size, dtype=torch.bool)
    written[locations // page_size, locations % page_size] = True
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    before = scenario.storage.movedim(3, 4)[:, :, ~written].view(bits)
    assert torch.equal(storage.movedim(3, 4)[:, :, ~written].view(bits), before)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("half", [None, 8, 20, 32])
@dtypes
def test_queries_and_pages_agree_and_other_locations_keep_their_bits(
    dtype: torch.dtype, half: int | None, norms: bool
) -> None:
    heads = Heads(8, 4, 64)
    check(lay_out(MIXED, heads, dtype=dtype), heads, half=half, norms=norms, dtype=dtype)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 5, 16, 64]), dtype=st.sampled_from(DTYPES))
def test_any_shape_agrees(data: st.DataObject, page_size: int, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(2, 256))
    kv_heads = data.draw(st.integers(1, 3))
    heads = Heads(kv_heads * data.draw(st.integers(1, 5)), kv_heads, dim)
    half = data.draw(st.integers(1, dim // 2) | st.none())
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    check(scenario, heads, half=half, norms=data.draw(st.booleans()), dtype=dtype)


@dtypes
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    heads = Heads(8, 4, 64)
    scenario = lay_out([(1, 20, 90)], heads, dtype=dtype)
    qkv = random(20, 16, 64, dtype=dtype)
    together = write(gpu(), scenario, qkv, heads, 32, True)
    last = lay_out([(1, 1, 90)], heads, dtype=dtype)
    alone = write(gpu(), last, qkv[-1:], heads, 32, True)
    assert torch.equal(together.q[-1:], alone.q)
    location = int(last.host.token_locations[0])
    at = (0, slice(None), location // 16, slice(None), location % 16)
    assert torch.equal(together.kv.plain()[at], alone.kv.plain()[at])


def test_rows_of_a_wider_matrix_are_taken_as_they_lie() -> None:
    heads, backend = Heads(2, 1, 16), gpu()
    scenario = lay_out([(1, 3, 40)], heads)
    qkv = random(3, 4, 16, seed=4)
    step = scenario.on(backend, qkv=qkv)
    wide = backend.place(torch.full((3, 100), 7.0))
    wide[:, 20:84] = backend.place(qkv.flatten(1))
    backend.rotary_kv_write(wide[:, 20:84], step.batch, step.kv, 0)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 84:] == 7).all()
    expected = write(REFERENCE, scenario, qkv, heads, None, False).kv.plain()
    torch.testing.assert_close(step.kv.plain().cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_positions_outside_are_refused_before_anything_is_written() -> None:
    backend = gpu()
    step = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(backend, qkv=random(2, 4, 16))
    rows = backend.place(step.qkv)
    before = rows.clone(), step.kv.storage.clone()
    short = Rotation(*(backend.place(table) for table in tables(39, 8)))
    with pytest.raises(ValueError, match="batch: positions go to 39, but cos has 39 rows"):
        backend.rotary_kv_write(rows, step.batch, step.kv, 0, short)
    assert torch.equal(rows, before[0])
    torch.testing.assert_close(step.kv.storage, before[1], rtol=0, atol=0, equal_nan=True)


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    backend = gpu()
    step = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(backend, qkv=random(2, 4, 16))
    rows, at = backend.place(step.qkv), (step.batch, step.kv)
    with pytest.raises(TypeError, match=r"qkv must be torch.float32 as the KV pages"):
        backend.rotary_kv_write(rows.bfloat16(), *at, 0)
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        backend.rotary_kv_write(rows, *at, 1)
    nine = Rotation(*(backend.place(table) for table in tables(50, 9)))
    with pytest.raises(ValueError, match="cos must have at most 8 columns, got 9"):
        backend.rotary_kv_write(rows, *at, 0, nine)
    query, key = (backend.place(random(size)) for size in (15, 16))
    short = HeadNorms(query, key, 1e-6)
    with pytest.raises(ValueError, match=r"norms.query must be contiguous, of shape \(16,\)"):
        backend.rotary_kv_write(rows, *at, 0, None, short)
    other = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(REFERENCE, qkv=random(2, 4, 16))
    with pytest.raises(TypeError, match="batch must be one that this backend prepared"):
        backend.rotary_kv_write(rows, other.batch, step.kv, 0)
