"""Branches of draft tokens change no token, whatever they hold, and bring as much as a chain
does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import (
    ConfigError,
    DrafterSpec,
    Engine,
    SamplingParams,
    Speculation,
    hookimpl,
)
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.engine.stats import EngineStats
from aioserve.testing import FakeModel
from tests.engine.idle import all_given_back
from tests.engine.test_draft_model import GREEDY, SAMPLED, SHARED, TIGHT
from tests.parity import tiny_models

LOGGED = SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.4)
MAX_TOKENS = 40
Answers = dict[tuple[int, ...], list[tuple[int, ...]]]
"""Samples of each prompt."""
DraftRule = Callable[[list[int], int], tuple[list[int], list[list[int]]]]
"""Makes a chain and branches from the coming tokens and a number of rows."""

pytestmark = pytest.mark.asyncio


class Branching(Drafter):
    """A drafter that knows the coming tokens, and makes its draft tokens by a function of them."""

    def __init__(self, answers: Answers, rule: DraftRule) -> None:
        self._answers, self._rule = answers, rule
        self._known: dict[int, tuple[int, list[int]]] = {}
        self._branches: dict[int, list[list[int]]] = {}

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._known[slot] = sequence.prompt_tokens, sequence.known_ids.tolist()

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._known[slot][1].extend(token_ids)

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        prompt_tokens, known = self._known[slot]
        generated = known[prompt_tokens:]
        for sample in self._answers[tuple(known[:prompt_tokens])]:
            if [*sample[: len(generated)]] == generated:
                chain, self._branches[slot] = self._rule([*sample[len(generated) :]], limit)
                return chain
        raise AssertionError(f"{generated} begins no answer")

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        return self._branches[slot]

    def end(self, slot: int) -> None:
        del self._known[slot]


class Plugin:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("branching", lambda: self._drafter)]


def wrong(ids: Sequence[int]) -> list[int]:
    return [(token + 1) % tiny_models.VOCAB_SIZE for token in ids]


def branch_alone_right(coming: list[int], limit: int) -> tuple[list[int], list[list[int]]]:
    """Make a wrong chain of one token, and a right branch of the rest, if there is room for
    both."""
    if limit < 3:
        return coming[:limit], []
    return wrong(coming[:1]), [coming[: limit - 2]] if coming else []


def chain_right(coming: list[int], limit: int) -> tuple[list[int], list[list[int]]]:
    return coming[: limit if limit < 3 else limit - 2], []


def anything(draw: random.Random) -> DraftRule:
    """Make random chains and branches, which usually begin right."""

    def path(coming: list[int], count: int) -> list[int]:
        right = draw.randint(0, count)
        return coming[:right] + wrong(coming[right:count])

    def rule(coming: list[int], limit: int) -> tuple[list[int], list[list[int]]]:
        chain = path(coming, draw.randint(0, min(limit, 3)))
        left, branches = limit - len(chain), list[list[int]]()
        while left > 1 and coming and len(branches) < 4:
            branches.append(path(coming, draw.randint(1, left - 1)))
            left -= 1 + len(branches[-1])
        return chain, branches

    return rule


def requests(ask_for_more: bool = True) -> list[tuple[list[int], SamplingParams]]:
    """Requests, some of which share a prefix, have two samples, or ask for more than a draw."""
    every: list[tuple[list[int], SamplingParams]] = []
    for place in range(8):
        params = (GREEDY, SAMPLED, SAMPLED, LOGGED if ask_for_more else GREEDY)[place % 4]
        n = 2 if place in (2, 5) else 1
        prompt = [*SHARED[: 35 - place % 3], 100 + place] if place % 2 else [*range(place + 1)]
        changed = msgspec.structs.replace(
            params, max_tokens=MAX_TOKENS, ignore_eos=True, seed=place, n=n
        )
        every.append((prompt, changed))
    return every


async def answers(
    model: Path,
    drafter: Drafter | None = None,
    max_branches: int = 4,
    ask_for_more: bool = True,
    **options: Any,
) -> tuple[Answers, EngineStats]:
    """Return answers by prompt. One request runs first, to cache the prefix that others share."""
    if drafter is not None:
        speculation = Speculation(drafter="branching", max_tokens=9, max_branches=max_branches)
        options |= {"speculation": speculation, "plugins": [Plugin(drafter)]}
    async with Engine(str(model), **options) as engine:
        first, *others = asked = requests(ask_for_more)
        done = [await engine.generate(*first)]
        left = asyncio.create_task(engine.generate(*first))
        tasks = [asyncio.create_task(engine.generate(*one)) for one in others]
        await asyncio.sleep(0.01)
        left.cancel()
        done += await asyncio.gather(*tasks)
        assert await all_given_back(engine)
        found = {
            tuple(prompt): [tuple(sample.token_ids) for sample in completion.samples]
            for (prompt, _), completion in zip(asked, done, strict=True)
        }
        return found, engine.stats()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, and one with window layers."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.write(request.param, path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1},
        TIGHT,
        TIGHT | {"num_host_pages": 200, "preemption": "swap"},
        {"overlap": False, "page_size": 4},
    ],
    ids=str,
)
async def test_no_branch_changes_a_token(model: Path, options: dict[str, Any]) -> None:
    expected, _ = await answers(model)
    for seed in range(3):
        drafter = Branching(expected, anything(random.Random(seed)))
        found, stats = await answers(model, drafter, **options)
        assert found == expected
        assert stats.drafter_faults_total == 0
        assert sum(stats.tokens_drafted_total) > sum(stats.tokens_accepted_total) > 0


async def test_a_branch_that_is_right_brings_what_a_chain_does(model: Path) -> None:
    expected, _ = await answers(model, ask_for_more=False)
    (_, branches), (_, chains), (_, cut) = [
        await answers(
            model, Branching(expected, rule), ask_for_more=False, max_branches=most, max_num_seqs=4
        )
        for rule, most in ((branch_alone_right, 4), (chain_right, 4), (branch_alone_right, 0))
    ]
    assert branches.steps_total <= 1.2 * chains.steps_total < 0.8 * cut.steps_total
    assert branches.tokens_drafted_total == branches.tokens_accepted_total


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"max_branches": 9}, "max_branches"),
        ({"max_branches": 2, "max_tokens": 3}, "at most half of max_tokens=3, got 2"),
        ({"max_branches": 1, "acceptance": "rejection"}, "keeps draft tokens of one path"),
    ],
)
async def test_branches_that_cannot_be_are_refused(
    speculation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation(drafter="ngram", **speculation)


async def test_branches_of_a_drafter_that_makes_none_are_refused() -> None:
    speculation = Speculation(drafter="suffix", max_branches=1)
    with pytest.raises(ConfigError, match="max_branches=1 of speculation has no effect"):
        async with Engine("pyhelp", speculation=speculation):
            pass


async def test_branches_where_nothing_verifies_them_are_refused() -> None:
    speculation = Speculation(drafter="ngram", max_branches=1)
    with pytest.raises(ConfigError, match="max_branches=1 of speculation isn't supported"):
        async with Engine(FakeModel(), speculation=speculation):
            pass
