"""Native attention over latents against a float64 reference, and bit for bit against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.backend import RMSNorm, Rotation
from tests.ops.latent_scenes import Latents, angles, check_writes, on, padded_rows, scene
from tests.ops.scenarios import BACKENDS, DTYPES, NATIVE, REFERENCE, Scenario, random
from tests.tiers import examples

# A lone token, a prefill, chunks across a key block and across a split of the keys, decodes.
MIXED = [
    *((1, 1, 1), (2, 70, 70), (3, 1, 65), (4, 33, 600), (5, 1, 700), (6, 5, 64)),
    *((7, 20, 140), (8, 3, 128), (9, 1, 129)),
]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def attend(scenario: Scenario, latents: Latents) -> Tensor:
    return on(NATIVE, scenario, latents).attend(NATIVE, latents.dim**-0.5)


def check(scenario: Scenario, latents: Latents) -> None:
    got = attend(scenario, latents)
    wide = on(REFERENCE, scenario, latents, wide=True)
    expected = wide.attend(REFERENCE, latents.dim**-0.5)
    assert got.shape == expected.shape == (len(scenario.q), latents.q_heads * latents.rank)
    assert got.dtype == scenario.q.dtype
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    else:  # results are rounded to 8 bits, and so are weights, by up to 2^-8 of the largest value
        torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixed_batch_agrees_with_the_reference(
    isa: str, dtype: torch.dtype, page_size: int
) -> None:
    latents = Latents(8, 64, 16)
    check(scene(MIXED, latents, page_size=page_size, dtype=dtype), latents)


# There are few rows and many, and ranks that fill vectors and tiles or don't, or are odd.
SIZES = [Latents(1, 16, 4), Latents(4, 40, 8), Latents(5, 37, 6), Latents(71, 32, 32)]


@pytest.mark.parametrize("latents", [*SIZES, Latents(16, 512, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_counts_and_sizes_agree_with_the_reference(
    isa: str, dtype: torch.dtype, latents: Latents
) -> None:
    check(scene([(1, 3, 70), (2, 1, 530), (3, 9, 9)], latents, dtype=dtype), latents)


sequences = st.integers(1, 200).flatmap(
    lambda context: st.tuples(st.integers(1, 9), st.integers(1, context), st.just(context))
)


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.lists(sequences, min_size=1, max_size=5),
    q_heads=st.integers(1, 9),
    rank=st.integers(1, 40),
    rotated=st.integers(1, 5).map(lambda half: 2 * half),
    page_size=st.sampled_from([1, 2, 5, 8, 16, 24, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch_agrees_with_the_reference(
    batch: list[tuple[int, int, int]],
    q_heads: int,
    rank: int,
    rotated: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    latents = Latents(q_heads, rank, rotated)
    check(scene(batch, latents, page_size=page_size, dtype=dtype), latents)


@pytest.mark.parametrize("latents", [Latents(2, 24, 8), Latents(9, 33, 6), Latents(16, 64, 32)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_to_the_last_bit_in_any_chunk_batch_and_page_size(
    isa: str, dtype: torch.dtype, latents: Latents
) -> None:
    """Other sequences have prefixes of other lengths, down to one page and none."""
    context = 1100
    whole = attend(scene([(7, context, context)], latents, dtype=dtype), latents)
    for page_size, chunk in ((16, 1), (1, 37), (64, 300), (7, 3), (16, 16)):
        for end in (1, 129, 512, 1025):
            tokens = min(chunk, end)
            others = [(1, 5, 40), (7, tokens, end), (2, 1, 900), (3, page_size, page_size)]
            scenario = scene(others, latents, page_size=page_size, dtype=dtype, seed=end)
            rows = attend(scenario, latents)[5 : 5 + tokens]
            assert torch.equal(rows, whole[end - tokens : end]), (page_size, chunk, end)


@pytest.mark.parametrize("sequences", [[(1, 1, 3000)], [(1, 3, 1500), (2, 1, 2000)], MIXED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(
    threads: None, dtype: torch.dtype, sequences: list[tuple[int, int, int]]
) -> None:
    latents = Latents(8, 64, 16)
    scenario = scene(sequences, latents, dtype=dtype)
    _native.set_num_threads(1)
    alone = attend(scenario, latents)
    for count in (2, 3, 5):
        _native.set_num_threads(count)
        assert torch.equal(attend(scenario, latents), alone), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_that_share_pages_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    latents = Latents(4, 32, 8)
    scenario = scene([(1, 1, 1100), (1, 1, 1090), (2, 3, 1100)], latents, dtype=dtype)
    scenario.share(1, of=0, first=0, last=64)
    scenario.share(2, of=0, first=0, last=33)
    together = attend(scenario, latents)
    apart = [attend(scenario.alone(row), latents) for row in range(3)]
    assert torch.equal(together, torch.cat(apart))


@backends
def test_logit_rows_alone_are_the_same_rows(backend: Backend) -> None:
    latents = Latents(6, 32, 8)
    scenario = scene(MIXED, latents)
    scenario.host.logit_rows[:] = scenario.host.logit_rows[::-1]
    step = on(backend, scenario, latents)
    every = step.attend(backend, 0.2)
    some = step.attend(backend, 0.2, logit_rows_only=True)
    assert torch.equal(some, every[torch.from_numpy(scenario.host.logit_rows)])


@backends
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latents", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_normalise_latents_and_turn_the_rest(
    backend: Backend, dtype: torch.dtype, latents: Latents, interleaved: bool
) -> None:
    check_writes(backend, latents, dtype, interleaved=interleaved)


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_take_the_first_rows_of_all_layers(backend: Backend, dtype: torch.dtype) -> None:
    latents, page_size = Latents(2, 33, 4), 8
    source, target = (backend.allocate_kv(latents.shape(5, page_size, dtype)) for _ in range(2))
    source.storage.copy_(random(*source.storage.shape, dtype=dtype, seed=1))
    target.storage.fill_(7.0)
    copies = np.array([[0, 3, 1, 2, 8], [0, 1, 1, 4, 3]], np.int32)
    backend.copy_pages([source, target], copies)
    for layer in (0, 1):
        from_pages, to_pages = (padded_rows(kv, layer) for kv in (source, target))
        assert torch.equal(to_pages[2], from_pages[3])
        assert torch.equal(to_pages[4, :3], from_pages[1, :3])
        assert bool((to_pages[4, 3:] == 7).all() and (to_pages[[0, 1, 3]] == 7).all())


@backends
def test_what_does_not_fit_is_refused_by_name(backend: Backend) -> None:
    latents = Latents(4, 32, 8)
    step = on(backend, scene([(1, 3, 3)], latents), latents)
    cos, sin = angles(4, 64, seed=0)
    norm, rotation = RMSNorm(torch.ones(32), 1e-6), Rotation(cos, sin)
    written = torch.zeros(3, 40)
    for message, change in {
        "queries|qkv": {"queries": step.queries[:, :-1]},
        "latents must have shape": {"latents": written[:2]},
        "norm.weight": {"norm": RMSNorm(torch.ones(31), 1e-6)},
        "query_scale": {"rotation": Rotation(cos, sin, False, torch.ones(64))},
        "positions go to 2": {"rotation": Rotation(cos[:2], sin[:2])},
        "cos must have at most 4": {"rotation": Rotation(*angles(5, 64, seed=0))},
    }.items():
        arguments = {
            "queries": step.queries,
            "latents": written,
            "rotation": rotation,
            "norm": norm,
        }
        arguments |= change
        with pytest.raises((ValueError, TypeError), match=message):
            backend.latent_write(
                arguments["queries"],
                arguments["latents"],
                step.at,
                arguments["rotation"],
                arguments["norm"],
            )
    with pytest.raises(ValueError, match="latent_rank must be"):
        backend.allocate_kv(latents.shape(1, 1, torch.float32)._replace(latent_rank=41))
