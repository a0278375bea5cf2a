"""Tokens that a row doesn't attend to have no part in its result, even if they are NaN.

A weight of 0 would not do, as 0 times NaN is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioserve import _native
from aioserve.ops.backend import HeadNorms, Rotation
from tests.ops.latent_scenes import Latents, angles, scene
from tests.ops.scenarios import DTYPES, NATIVE, REFERENCE, Heads, lay_out, random
from tests.ops.unseen_keys import MIXED, Broken, check_latent, check_plain

HEADS = [(Heads(2, 2, 32), 16), (Heads(6, 1, 80), 3), (Heads(14, 2, 64), 64), (Heads(3, 1, 37), 1)]
LATENTS = [Latents(1, 16, 4), Latents(5, 37, 6), Latents(16, 64, 16)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 33},
    {"soft_cap": 4.0, "sinks": True},
    {"window": 130, "soft_cap": 4.0},
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
options = pytest.mark.parametrize("options", OPTIONS, ids=lambda chosen: "-".join(chosen) or "none")


def of_heads(options: dict[str, Any], heads: Heads) -> dict[str, Any]:
    return {**options, "sinks": random(heads.q, seed=5)} if "sinks" in options else options


@dtypes
@options
@pytest.mark.parametrize(("heads", "page_size"), HEADS, ids=str)
def test_rows_have_nothing_of_tokens_that_they_do_not_see(
    isa: str, dtype: torch.dtype, options: dict[str, Any], heads: Heads, page_size: int
) -> None:
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    check_plain(NATIVE, scenario, **of_heads(options, heads))


@dtypes
@options
@pytest.mark.parametrize(("heads", "page_size"), HEADS, ids=str)
def test_the_reference_agrees(
    dtype: torch.dtype, options: dict[str, Any], heads: Heads, page_size: int
) -> None:
    scenario = lay_out(MIXED, heads, page_size=page_size, dtype=dtype)
    check_plain(REFERENCE, scenario, **of_heads(options, heads))


@dtypes
def test_nothing_comes_through_norms_and_rotation(isa: str, dtype: torch.dtype) -> None:
    """A NaN in a key spreads to all of its numbers."""
    scenario = lay_out(MIXED, Heads(4, 2, 24), dtype=dtype)
    rotation = Rotation(*angles(8, scenario.host.max_context, seed=3))
    norms = HeadNorms(random(24, dtype=dtype, seed=1), random(24, dtype=dtype, seed=2), 1e-6)
    for backend in (NATIVE, REFERENCE):
        check_plain(backend, scenario, rotation=rotation, norms=norms)


@dtypes
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_rows_have_nothing_of_latents_that_they_do_not_see(
    isa: str, dtype: torch.dtype, latents: Latents
) -> None:
    check_latent(NATIVE, scene(MIXED, latents, dtype=dtype), latents)


@dtypes
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_the_reference_agrees_about_latents(dtype: torch.dtype, latents: Latents) -> None:
    check_latent(REFERENCE, scene(MIXED, latents, dtype=dtype), latents)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows_only", [False, True])
def test_units_that_run_split_by_split_see_no_more(isa: str, rows_only: bool) -> None:
    """Several threads compute a long context, each with splits of its own."""
    _native.set_num_threads(3)
    scenario = lay_out([(1, 12, 1500), (2, 700, 1300)], Heads(4, 1, 64), dtype=torch.bfloat16)
    tokens = [Broken(0, 1492, keys=False), Broken(1, 1023, keys=False), Broken(1, 1299)]
    check_plain(NATIVE, scenario, tokens, rows_only=rows_only)
