"""The likeliest of several continuations, by its mean or in all, over the pages of one prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from aioserve import Engine, InvalidPromptError, InvalidRequestError
from aioserve.testing.fake_model import FakeModel
from tests.engine.idle import all_given_back
from tests.parity import tiny_models

pytestmark = pytest.mark.asyncio

PROMPT = "import json\n\njson."
NAMES = ["dumps", "loads(text)", "listdir", "compress"]


async def test_the_likeliest_is_the_one_of_the_best_scores():
    async with Engine("pyhelp") as engine:
        scores = await engine.score_each(PROMPT, NAMES)
        totals = [score.logprob for score in scores]
        means = [score.logprob / len(score.token_ids) for score in scores]
        mean, total = (
            await engine.select(PROMPT, NAMES),
            await engine.select(PROMPT, NAMES, by="total"),
        )
        assert mean.logprobs == tuple(means)
        assert total.logprobs == tuple(totals)
        assert (mean.index, mean.text) == (means.index(max(means)), NAMES[mean.index])
        assert (total.index, total.text) == (totals.index(max(totals)), NAMES[total.index])
        assert [score.logprobs for score in mean.scores] == [score.logprobs for score in scores]
        assert await all_given_back(engine)


async def test_a_longer_one_wins_by_its_mean_and_loses_in_all():
    short, long = "charset", "DEFAULT_MESSAGE"
    async with Engine("pyhelp") as engine:
        by_mean = await engine.select(PROMPT, [short, long])
        in_all = await engine.select(PROMPT, [short, long], by="total")
        assert (by_mean.index, in_all.index) == (1, 0)


async def test_log_probabilities_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = tiny_models.write("llama", tmp_path / "llama")
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt, continuations = [5, 9, 14, 40], [[7], [8, 30, 9], [100, 101]]
    expected = []
    for ids in continuations:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        expected.append(
            math.fsum(float(logits[at, id]) for at, id in zip(places, ids, strict=True)) / len(ids)
        )
    async with Engine(str(path), num_pages=200, device="cpu") as engine:
        selected = await engine.select(prompt, continuations)
        assert selected.logprobs == pytest.approx(expected, abs=1e-4)
        assert selected.index == expected.index(max(expected))
        assert selected.text == engine.tokenizer.decode(continuations[selected.index])


async def test_all_but_the_first_share_the_pages_of_the_prompt():
    async with Engine(FakeModel(num_pages=64), page_size=4) as engine:
        selected = await engine.select([*range(1, 14)], [[1, 2], [3], [4, 5, 6]], request_id="x")
        assert [score.usage.cached_tokens for score in selected.scores] == [0, 12, 12]
        assert [score.request_id for score in selected.scores] == ["x-0", "x-1", "x-2"]


async def test_of_equals_the_first_is_selected():
    async with Engine("pyhelp") as engine:
        selected = await engine.select(PROMPT, ["dumps", "dumps"])
        assert selected.index == 0
        assert repr(selected).startswith("Selection(0, 'dumps', logprob=-")


@pytest.mark.parametrize(
    ("continuations", "argument"),
    [
        ([], "continuations"),
        ((), "continuations"),
        ("text", "continuations"),
        (None, "continuations"),
        (["dumps", ""], "continuation"),
        ([[5], []], "continuation"),
        ([[5], [10**6]], "continuation"),
        ([5], "continuation"),
    ],
)
async def test_no_continuations_and_those_without_a_token_are_refused(continuations, argument):
    async with Engine("pyhelp") as engine:
        with pytest.raises(InvalidPromptError) as refused:
            await engine.select(PROMPT, continuations)
        assert refused.value.argument == argument
        assert await all_given_back(engine)


@pytest.mark.parametrize("by", ["sum", None, 1, ["mean"]])
async def test_another_way_to_compare_is_refused(by: Any):
    async with Engine("pyhelp") as engine:
        with pytest.raises(InvalidRequestError, match="by must be one of") as refused:
            await engine.select(PROMPT, NAMES, by=by)
        assert refused.value.argument == "by"
