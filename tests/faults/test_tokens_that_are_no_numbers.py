"""A model with a token whose embedding is NaN: whoever asks for it ends, and no other sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aioserve import (
    DrafterSpec,
    Engine,
    RequestFailedError,
    SamplingParams,
    Speculation,
    hookimpl,
)
from aioserve.drafting.drafter import DraftedSequence, Drafter
from tests.parity import tiny_models

BAD = 77
COMMON = [10 + (7 * i) % 60 for i in range(40)]
GOOD = [[*COMMON, *[100 + i] * 5] for i in range(3)]
BROKEN = [[*COMMON, BAD, *[120 + i] * (3 + i)] for i in range(2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module", params=["llama3", "qwen3-sliding", "deepseek2", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that see everything, those with windows, latents, and sinks."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.write(request.param, path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return path


async def answer(engine: Engine, prompt: Sequence[int]) -> tuple[int, ...] | str:
    try:
        return tuple((await engine.generate(prompt, GREEDY)).token_ids)
    except RequestFailedError as error:
        return str(error)


async def each_alone(model: Path) -> list[tuple[int, ...] | str]:
    async with Engine(model, prefix_caching=False) as engine:
        return [await answer(engine, prompt) for prompt in GOOD]


@pytest.mark.parametrize("backend", ["native", "reference"])
async def test_those_that_share_pages_with_a_broken_one_have_their_tokens(
    model: Path, backend: str
) -> None:
    expected = [*await each_alone(model), *["the logits have a NaN"] * 2]
    prompts = [*GOOD, *BROKEN]
    for order in ([3, 0, 4, 1, 2], [0, 3, 1, 4, 2]):
        options = {"backend": backend, "dtype": "float32", "page_size": 16}
        async with Engine(model, max_num_batched_tokens=64, **options) as engine:
            done = await asyncio.gather(*(answer(engine, prompts[i]) for i in order))
            assert list(done) == [expected[i] for i in order]


class Wrong(Drafter):
    """Drafts the broken token, always."""

    def start(self, slot: int, sequence: DraftedSequence) -> None: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        return [BAD] * limit

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        return [[1, BAD]] if limit > 1 else []

    def end(self, slot: int) -> None: ...


class Plugin:
    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("wrong", Wrong)]


@pytest.mark.parametrize("max_branches", [0, 2])
async def test_a_wrong_draft_ends_no_request(model: Path, max_branches: int) -> None:
    expected = await each_alone(model)
    speculation = Speculation(drafter="wrong", max_tokens=6, max_branches=max_branches)
    async with Engine(model, speculation=speculation, plugins=[Plugin()]) as engine:
        assert [await answer(engine, prompt) for prompt in GOOD] == expected
        stats = engine.stats()
        assert sum(stats.tokens_drafted_total) > sum(stats.tokens_accepted_total) == 0
