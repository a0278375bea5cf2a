"""Bare forward pass of every architecture, through the paged cache, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import Backend
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import ARCHITECTURES, CONFIGS, VOCAB_SIZE

TOLERANCE = 1e-5
"""Largest error, as a share of the largest logit."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    assert actual.shape == exact.shape
    assert (actual.dtype, exact.dtype) == (torch.float32, torch.float64)
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    return (actual - expected).abs().max().item()


@pytest.fixture
def decoder_of(backend: Backend, directory_of: Callable[[str], Path]) -> Callable[..., Decoder]:
    def load(name: str, **options: Any) -> Decoder:
        return load_model(directory_of(name), backend=backend, **options)

    return load


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_prompt_gives_the_logits_of_transformers(name, decoder_of, oracle, exact_logits):
    """Both round in float32, in different orders, and are equally close to float64."""
    ids = prompt(100)
    run = PagedRun(decoder_of(name))

    logits = run.step({"a": ids})["a"]

    exact = exact_logits(name, ids)
    assert relative_error(logits, exact) < TOLERANCE
    rounding = [
        (found.double() - exact).square().mean().sqrt().item()
        for found in (logits, expected_logits(oracle(name), ids))
    ]
    assert rounding[0] < 1.5 * rounding[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_decodes_of_several_sequences_give_the_logits_of_transformers(
    name, decoder_of, exact_logits
):
    """Lengths and chunks are odd, windows and pages are crossed, decodes and prefills mix."""
    prompts = {"a": prompt(83, 1), "b": prompt(31, 2), "c": prompt(70, 3), "d": prompt(9, 4)}
    chunk_sizes = {"a": (7, 1, 1, 30, 1, 43), "b": (13, 17, 1), "c": (70,), "d": (1,) * 9}
    begins = {"a": 0, "b": 1, "c": 3, "d": 0}
    run = PagedRun(decoder_of(name))
    parts: dict[str, list[torch.Tensor]] = {key: [] for key in prompts}

    for step in range(9):
        chunks = {}
        for key, ids in prompts.items():
            turn, done = step - begins[key], sum(len(part) for part in parts[key])
            if 0 <= turn < len(chunk_sizes[key]):
                chunks[key] = ids[done : done + chunk_sizes[key][turn]]
        for key, logits in run.step(chunks).items():
            parts[key].append(logits)

    for key, ids in prompts.items():
        exact = exact_logits(name, ids, long_context=True)
        assert relative_error(torch.cat(parts[key]), exact) < TOLERANCE, key


def test_longrope_serving_short_contexts_uses_the_short_factors(decoder_of, exact_logits):
    ids = prompt(64)
    run = PagedRun(decoder_of("phi3-longrope", max_model_len=64))

    logits = run.step({"a": ids})["a"]

    assert relative_error(logits, exact_logits("phi3-longrope", ids)) < TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_stays_near_float32(name, decoder_of, oracle):
    """Logits of rounded weights and activations differ, but clearly are of the same function."""
    ids = prompt(60)
    run = PagedRun(decoder_of(name, dtype="bfloat16"))

    logits = run.step({"a": ids})["a"]

    expected = expected_logits(oracle(name), ids)
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert error.item() < 0.06


def test_only_the_sampled_rows_come_back_in_the_order_asked_for(decoder_of):
    decoder = decoder_of("qwen3")
    chunks = {"a": prompt(5), "b": prompt(8, 1)}
    every_row = PagedRun(decoder).step(chunks)

    some = PagedRun(decoder).rows(chunks, [12, 4])
    run = PagedRun(decoder)
    none = run.rows(chunks, [])

    assert largest_error(some, torch.cat(list(every_row.values()))[[12, 4]]) < 1e-5
    assert none.shape == (0, VOCAB_SIZE)
    # Rows without logits were computed all the same: the next token attends to them.
    following = PagedRun(decoder)
    following.step(chunks)
    expected = following.step({"a": [7]})["a"]
    assert largest_error(run.step({"a": [7]})["a"], expected) < 1e-5
