"""Order of equal logits: the lowest id comes first, regardless of other requests in the step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file, save_file

from aioserve import Engine, SamplingParams
from tests.parity import tiny_models

GROUP = 9
PROMPTS = [[5 + i, 60, 7 * i + 1] for i in range(6)]
pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which each token has the same logit as eight others."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.write("llama3", path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    for first in range(0, len(head), GROUP):
        head[first : first + GROUP] = head[first]
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def params(logprobs: int, prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=6,
        temperature=0.0,
        ignore_eos=True,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


@pytest.mark.parametrize("backend", ["native", "reference"])
async def test_ids_of_logprobs_do_not_depend_on_what_others_ask_for(
    model: Path, backend: Literal["native", "reference"]
) -> None:
    async def tops(engine: Engine, prompt: list[int], logprobs: int) -> list[list[int]]:
        asked = params(logprobs, logprobs)
        done = await engine.generate(prompt, asked)
        every = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
        return [[top.id for top in one.top] for one in every if one is not None]

    async with Engine(model, backend=backend, dtype="float32") as engine:
        alone = [await tops(engine, prompt, 3 + i) for i, prompt in enumerate(PROMPTS)]
        asked = [tops(engine, prompt, 3 + i) for i, prompt in enumerate(PROMPTS)]
        crowd = await asyncio.gather(*asked, tops(engine, [9, 9], 20))
    assert crowd[:-1] == alone
    for ids in [ids for one in crowd for ids in one]:
        groups = [id // GROUP for id in ids]
        assert ids[:GROUP] == [*range(groups[0] * GROUP, groups[0] * GROUP + GROUP)][: len(ids)]


async def test_beams_do_not_depend_on_who_else_is_in_the_step(model: Path) -> None:
    async with Engine(model) as engine:

        async def beams(width: int) -> list[tuple[int, ...]]:
            found = await engine.beam_search(PROMPTS[0], max_tokens=5, beam_width=width)
            return [beam.token_ids for beam in found]

        alone = [await beams(width) for width in (2, 5)]
        others = [engine.generate(prompt, params(20)) for prompt in PROMPTS]
        crowd = await asyncio.gather(beams(2), beams(5), *others)
    assert [*crowd[:2]] == alone
    for found in alone:  # they end in tokens of equal logits, of which the lowest ids are kept
        assert [beam[-1] % GROUP for beam in found] == [*range(len(found))]
