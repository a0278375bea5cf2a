"""Latent attention on the GPU: writes, and attention against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aioserve.ops import Backend
from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.latent_scenes import Latents, check_writes, on, scene
from tests.ops.scenarios import REFERENCE, Scenario

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [Latents(1, 16, 4), Latents(5, 37, 6), Latents(20, 32, 32)]
# Decodes come first, as in the engine's steps, one of them in the middle of a page.
MIXED = [(1, 1, 1), (2, 1, 37), (3, 1, 64), (4, 20, 20), (5, 3, 50), (6, 5, 33)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gpu() -> Backend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


def attend(scenario: Scenario, latents: Latents) -> Tensor:
    return on(gpu(), scenario, latents).attend(gpu(), latents.dim**-0.5).cpu()


@pytest.mark.parametrize("latents", SIZES, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@dtypes
def test_a_mixed_batch_agrees_with_the_reference(
    dtype: torch.dtype, page_size: int, latents: Latents
) -> None:
    scenario = scene(MIXED, latents, page_size=page_size, dtype=dtype)
    expected = on(REFERENCE, scenario, latents, wide=True).attend(REFERENCE, latents.dim**-0.5)
    limit = 1e-5 if dtype is torch.float32 else 2**-6 if dtype is torch.bfloat16 else 2**-8
    got = attend(scenario, latents)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=limit, atol=limit)


@dtypes
def test_a_row_is_the_same_to_the_last_bit_as_decode_and_in_any_chunk_and_batch(
    dtype: torch.dtype,
) -> None:
    latents, context = Latents(5, 24, 8), 70
    whole = attend(scene([(7, context, context)], latents, dtype=dtype), latents)
    for page_size, chunk in ((16, 1), (1, 7), (5, 40)):
        for end in (1, 33, 70):
            tokens = min(chunk, end)
            batch = [(1, 1, 40), (7, tokens, end), (3, page_size, page_size)]
            scenario = scene(batch, latents, page_size=page_size, dtype=dtype, seed=end)
            rows = attend(scenario, latents)[1 : 1 + tokens]
            assert torch.equal(rows, whole[end - tokens : end]), (page_size, chunk, end)


def test_log_sum_exp_is_the_reference_s() -> None:
    latents = Latents(3, 16, 4)
    scenario = scene(MIXED, latents)
    sums = [torch.empty(len(scenario.q), 3) for _ in range(2)]
    for backend, out in zip((gpu(), REFERENCE), sums, strict=True):
        step, on_device = on(backend, scenario, latents), backend.place(out)
        kind = AttentionKind(0.2)
        backend.paged_attention(step.queries, step.at, kind, log_sum_exp=on_device)
        out.copy_(on_device)
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latents", [*SIZES, Latents(2, 9, 11)], ids=str)
@dtypes
def test_writes_normalise_latents_and_turn_the_rest(
    dtype: torch.dtype, latents: Latents, interleaved: bool
) -> None:
    check_writes(gpu(), latents, dtype, interleaved=interleaved)


@pytest.mark.parametrize(
    "kind", [AttentionKind(1.0, window=4), AttentionKind(1.0, soft_cap=2.0)], ids=str
)
def test_what_the_kernel_does_not_know_is_refused(kind: AttentionKind) -> None:
    latents = Latents(2, 16, 4)
    step = on(gpu(), scene([(1, 1, 3)], latents), latents)
    with pytest.raises(ValueError, match="no window, soft cap or sinks"):
        gpu().paged_attention(step.queries, step.at, kind)
    with pytest.raises(ValueError, match="latent_rank must be at most 512"):
        gpu().allocate_kv(Latents(2, 513, 7).shape(1, 1, torch.float32))
