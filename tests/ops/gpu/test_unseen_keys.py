"""Tokens that a row doesn't attend to have no part in its result on the GPU, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioserve.ops.backend import HeadNorms, Rotation
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.latent_scenes import Latents, angles, scene
from tests.ops.scenarios import Heads, lay_out, random
from tests.ops.unseen_keys import INFINITY, Broken, check_latent, check_plain

# The interpreter multiplies with numpy, which warns of NaN, where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

MIXED = [(1, 1, 21), (2, 21, 21), (3, 9, 50), (4, 2, 2)]
BROKEN = [
    Broken(1, 7),
    Broken(1, 17, INFINITY, keys=False),
    Broken(2, 46, INFINITY),
    Broken(3, 1, values=False),
]
DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gpu() -> CudaBackend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


@dtypes
@pytest.mark.parametrize("options", [{}, {"window": 9, "soft_cap": 4.0}], ids=str)
def test_rows_have_nothing_of_tokens_that_they_do_not_see(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check_plain(gpu(), lay_out(MIXED, Heads(6, 2, 24), dtype=dtype), BROKEN, **options)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_comes_through_norms_and_rotation(dtype: torch.dtype, interleaved: bool) -> None:
    """There are more heads than a program has, so that a key and its value are in two."""
    backend = gpu()
    scenario = lay_out(MIXED, Heads(10, 5, 24), dtype=dtype)
    cos, sin = map(backend.place, angles(8, scenario.host.max_context, seed=3))
    query, key = [backend.place(random(24, dtype=dtype, seed=seed)) for seed in (1, 2)]
    norms = HeadNorms(query, key, 1e-6)
    rotation = Rotation(cos, sin, interleaved)
    check_plain(backend, scenario, BROKEN, rotation=rotation, norms=norms)


@dtypes
def test_rows_have_nothing_of_latents_that_they_do_not_see(dtype: torch.dtype) -> None:
    latents = Latents(5, 37, 6)
    check_latent(gpu(), scene(MIXED, latents, dtype=dtype), latents, BROKEN)
