"""Whole models against transformers: tokens and logits, on the GPU and in its dtypes.

transformers computes on the CPU in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.models.loader import load_model
from aioserve.ops.gpu.backend import CudaBackend
from tests.gpu.place import Place
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import VOCAB_SIZE

MODELS = ["qwen3", "llama3", "gemma2", "gemma3", "mistral", "phi3", "deepseek3", "olmo3", "neox"]
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek2-moe", "deepseek3-moe", "gpt-oss"]
"""Models with experts. In two bytes, rounding may choose other experts than transformers does."""
SPREAD = {"bfloat16": 0.06, "float16": 0.01}
"""Spread of errors of logits, as a share of the logits' own. Rounded activations cause it."""

Oracle = Callable[[str], Any]


@pytest.fixture(scope="module")
def oracle(directory_of: Callable[[str], Path]) -> Oracle:
    transformers = pytest.importorskip("transformers")

    @cache
    def load(name: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory_of(name), attn_implementation="eager", dtype=torch.float32
        )
        for part in model.modules():
            if type(part).__name__ == "GptOssExperts":  # constants there in earlier releases
                part.alpha, part.limit = model.config.swiglu_alpha, model.config.swiglu_limit
        return model.eval()

    return load


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def chunked(place: Place, directory: Path, prompts: dict[str, list[int]], dtype: str) -> Any:
    """Return the logits of all tokens of prompts that are computed together in three chunks."""
    decoder = load_model(directory, backend=CudaBackend(place.device), dtype=dtype)
    run = PagedRun(decoder)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    with torch.inference_mode():
        for part in range(3):
            chunks = {}
            for name, ids in prompts.items():
                ends = [0, len(ids) // 2, len(ids) - 1, len(ids)]
                chunks[name] = ids[ends[part] : ends[part + 1]]
            for name, logits in run.step(chunks).items():
                parts[name].append(logits.cpu())
    return {name: torch.cat(found) for name, found in parts.items()}


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_logits_in_float32_are_those_of_transformers(
    place: Place, directory_of: Callable[[str], Path], oracle: Oracle, name: str
) -> None:
    prompts = {"a": prompt(place.size(83, 21), 1), "b": prompt(9, 2)}
    found = chunked(place, directory_of(name), prompts, "float32")
    for key, ids in prompts.items():
        torch.testing.assert_close(found[key], logits_of(oracle(name), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", SPREAD)
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_two_bytes_stay_near_those_of_transformers(
    place: Place, directory_of: Callable[[str], Path], oracle: Oracle, name: str, dtype: str
) -> None:
    ids = prompt(place.size(60, 20))
    found = chunked(place, directory_of(name), {"a": ids}, dtype)["a"]
    expected = logits_of(oracle(name), ids)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error.item() < SPREAD[dtype]


@pytest.mark.parametrize(
    ("name", "dtype", "slack"),
    [
        *((name, "float32", 1e-4) for name in ["qwen3", "llama3", "gemma2", "gemma3", "gpt-oss"]),
        *((name, "float32", 1e-4) for name in ["mixtral", "deepseek3-moe"]),
        *((name, "bfloat16", 0.2) for name in ["qwen3", "llama3", "gemma2"]),
    ],
)
def test_greedy_answers_of_an_engine_are_those_of_transformers(
    place: Place,
    directory_of: Callable[[str], Path],
    oracle: Oracle,
    name: str,
    dtype: str,
    slack: float,
) -> None:
    """Each token is the most likely one after those before it, within `slack` of its logit.

    In bfloat16 that is about the error of two logits, which are between -8 and 8.
    """
    prompts = [prompt(length, 3) for length in (1, 9, 31, 70)][: place.size(4, 2)]
    num_tokens = place.size(24, 4)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    options: dict[str, Any] = {
        "dtype": dtype,
        "page_size": 4,
        "num_pages": 80,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 37,
        "max_model_len": 128,
    }

    async def generate() -> list[list[int]]:
        async with Engine(place.assembled(directory_of(name)), **options) as engine:
            answers = await asyncio.gather(*(engine.generate(ids, params) for ids in prompts))
            return [list(answer.token_ids) for answer in answers]

    for ids, answer in zip(prompts, asyncio.run(generate()), strict=True):
        assert len(answer) == num_tokens
        after = logits_of(oracle(name), ids + answer)[len(ids) - 1 : -1]
        chosen = after.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (after.max(dim=1).values - chosen).max().item() <= slack
