"""Checks of the rotary embedding and the write into pages on every backend.

The reference is in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aioserve.ops import Backend
from aioserve.ops.backend import HeadNorms, Rotation
from tests.ops.contents import contents
from tests.ops.scenarios import REFERENCE, Heads, Scenario, Step, lay_out, random

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def tables(
    backend: Backend, rows: int, half: int, *, interleaved: bool = False, scaled: bool = False
) -> Rotation:
    angles = torch.arange(rows)[:, None] * 0.7 ** torch.arange(half)
    scales = backend.place(1 + torch.arange(rows) / 50) if scaled else None
    placed = backend.place(angles.cos()), backend.place(angles.sin())
    return Rotation(*placed, interleaved, scales)


def write(
    backend: Backend,
    scenario: Scenario,
    qkv: Tensor,
    heads: Heads,
    half: int | None,
    norms: bool,
    *,
    interleaved: bool = False,
    scaled: bool = False,
    wide: bool = False,
) -> Step:
    """Run the op on a backend, and return its queries and pages."""
    step = scenario.on(backend, qkv=qkv, wide=wide)
    rows = backend.place(step.qkv)
    given = None
    if norms:
        query, key = (random(heads.dim, dtype=scenario.q.dtype, seed=seed) for seed in (8, 9))
        query, key = (backend.place(weight.to(rows.dtype)) for weight in (query, key))
        given = HeadNorms(query, key, 1e-6, 1.0)
    kind = {"interleaved": interleaved, "scaled": scaled}
    rotation = tables(backend, 100, half, **kind) if half else None
    before = rows[:, step.q_size :].clone()
    backend.rotary_kv_write(rows, step.at, rotation, given)
    assert torch.equal(rows[:, step.q_size :], before)
    return Step(rows.cpu(), step.batch, step.kv, step.q_size)


def check(
    backend: Backend,
    scenario: Scenario,
    heads: Heads,
    *,
    half: int | None,
    norms: bool,
    dtype: torch.dtype,
    interleaved: bool = False,
    scaled: bool = False,
    dropped: int = 0,
    atol: float = 1e-5,
) -> None:
    """Check queries and pages against the reference, and that other locations keep their bits.

    Positions are indices plus the number of `dropped` entries."""
    scenario.host.positions[:] += dropped
    qkv = random(scenario.q.shape[0], heads.q + 2 * heads.kv, heads.dim, dtype=dtype, seed=4)
    kind = {"interleaved": interleaved, "scaled": scaled}
    step = write(backend, scenario, qkv, heads, half, norms, **kind)
    exact = write(REFERENCE, scenario, qkv, heads, half, norms, wide=True, **kind)
    storage = contents(step.kv).cpu()
    rtol = RELATIVE[dtype]
    torch.testing.assert_close(step.q.double(), exact.q, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        storage.double(), contents(exact.kv), rtol=rtol, atol=atol, equal_nan=True
    )
    page_size = scenario.page_size
    locations = torch.from_numpy(scenario.host.token_locations[0])
    written = torch.zeros(scenario.num_pages, page_size, dtype=torch.bool)
    written[locations // page_size, locations % page_size] = True
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    before = scenario.storage.movedim(3, 4)[:, :, ~written].view(bits)
    assert torch.equal(storage.movedim(3, 4)[:, :, ~written].view(bits), before)


def check_a_token_beside_others(
    backend: Backend,
    dtype: torch.dtype,
    num_tokens: int,
    before_alone: Callable[[], None] = lambda: None,
) -> None:
    """Check that the last token of a prompt has the same bits alone.

    `before_alone` is called between both runs."""
    heads = Heads(8, 4, 64)
    scenario = lay_out([(1, num_tokens, 90)], heads, dtype=dtype)
    qkv = random(num_tokens, 16, 64, dtype=dtype)
    together = write(backend, scenario, qkv, heads, 32, True)
    before_alone()
    last = lay_out([(1, 1, 90)], heads, dtype=dtype)
    alone = write(backend, last, qkv[-1:], heads, 32, True)
    assert torch.equal(together.q[-1:], alone.q)
    location = int(last.host.token_locations[0, 0])
    at = (0, slice(None), location // 16, slice(None), location % 16)
    assert torch.equal(contents(together.kv)[at], contents(alone.kv)[at])


def check_positions_outside(backend: Backend) -> None:
    """Check that they are refused before anything is written, whatever the indices."""
    scenario = lay_out([(1, 2, 35)], Heads(2, 1, 16))
    scenario.host.positions[:] += 5
    step = scenario.on(backend, qkv=random(2, 4, 16))
    rows = backend.place(step.qkv)
    before = rows.clone(), step.kv.storage.clone()
    with pytest.raises(ValueError, match="batch: positions go to 39, but cos has 39 rows"):
        backend.rotary_kv_write(rows, step.at, tables(backend, 39, 8), None)
    assert torch.equal(rows, before[0])
    torch.testing.assert_close(step.kv.storage, before[1], rtol=0, atol=0, equal_nan=True)


def check_arguments_that_do_not_fit(backend: Backend) -> None:
    """Check that arguments which don't fit are refused by name."""
    step = lay_out([(1, 2, 40)], Heads(2, 1, 16)).on(backend, qkv=random(2, 4, 16))
    rows, at = backend.place(step.qkv), step.at

    def norms(query: Tensor, key: Tensor) -> HeadNorms:
        return HeadNorms(backend.place(query), backend.place(key), 1e-6)

    with pytest.raises(TypeError, match=r"qkv must be torch.float32 as the KV pages"):
        backend.rotary_kv_write(rows.bfloat16(), at, None, None)
    shape = r"qkv must have shape \(2, \(Hq \+ 2\) \* 16\), Hq a multiple of 1, with dense rows on"
    with pytest.raises(ValueError, match=shape):
        backend.rotary_kv_write(rows[:, :32], at, None, None)
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=f"layer must be from 0 to 0, got {layer}"):
            backend.rotary_kv_write(rows, at._replace(layer=layer), None, None)
    fifty = tables(backend, 50, 8)
    with pytest.raises(ValueError, match="cos must have at most 8 columns, got 9"):
        backend.rotary_kv_write(rows, at, tables(backend, 50, 9), None)
    with pytest.raises(ValueError, match=r"cos must have shape \[positions, R / 2\]"):
        backend.rotary_kv_write(rows, at, Rotation(fifty.cos[0], fifty.sin[0]), None)
    with pytest.raises(TypeError, match=r"cos must be torch.float32, got torch.float64"):
        backend.rotary_kv_write(rows, at, Rotation(fifty.cos.double(), fifty.sin.double()), None)
    with pytest.raises(ValueError, match=r"sin must be .* of shape \(50, 8\)"):
        backend.rotary_kv_write(rows, at, Rotation(fifty.cos, tables(backend, 50, 7).sin), None)
    scales = tables(backend, 49, 8, scaled=True).query_scale
    with pytest.raises(ValueError, match=r"query_scale must be .* of shape \(50,\)"):
        backend.rotary_kv_write(rows, at, fifty._replace(query_scale=scales), None)
    with pytest.raises(ValueError, match=r"norms.query must be contiguous, of shape \(16,\)"):
        backend.rotary_kv_write(rows, at, None, norms(random(15), random(16)))
    with pytest.raises(TypeError, match=r"norms.key must be torch.float32, got torch.bfloat16"):
        backend.rotary_kv_write(rows, at, None, norms(random(16), random(16).bfloat16()))
