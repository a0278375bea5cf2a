"""Stop strings are prepared once for all completions that use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest

from aioserve import Engine, SamplingParams
from aioserve.text.stop import StopAutomaton

LONG_STOPS = tuple(f"{number:03}" + "abc" * 20 for number in range(16))


@pytest.fixture
def made() -> Iterator[list[tuple[str, ...]]]:
    """Record the stop strings of each automaton that is made."""
    made: list[tuple[str, ...]] = []
    make = StopAutomaton.__init__

    def noted(automaton: StopAutomaton, stops: tuple[str, ...]) -> None:
        made.append(stops)
        make(automaton, stops)

    with mock.patch.object(StopAutomaton, "__init__", noted):
        yield made


@pytest.mark.asyncio
async def test_samples_and_prompts_with_the_same_stop_strings_share_one_automaton(
    made: list[tuple[str, ...]],
) -> None:
    params = SamplingParams(n=16, max_tokens=2, stop=LONG_STOPS, seed=1)
    async with Engine("pyhelp") as engine:
        await asyncio.gather(*(engine.generate("x", params) for _ in range(8)))
        assert made == [LONG_STOPS]
        await engine.generate("x", SamplingParams(max_tokens=2, stop=list(LONG_STOPS)))
        assert made == [LONG_STOPS]


@pytest.mark.asyncio
async def test_each_sample_has_a_place_of_its_own_in_the_automaton(
    made: list[tuple[str, ...]],
) -> None:
    """Samples that reach their stop string at different tokens are each cut at their own."""
    free = SamplingParams(n=4, max_tokens=24, temperature=1, seed=3, ignore_eos=True)
    async with Engine("pyhelp") as engine:
        texts = [sample.text for sample in (await engine.generate("def f", free)).samples]
        stops = tuple(dict.fromkeys(text[place : place + 2] for place, text in enumerate(texts, 3)))
        params = SamplingParams(
            n=4, max_tokens=24, temperature=1, seed=3, ignore_eos=True, stop=stops
        )
        cut = [sample.text for sample in (await engine.generate("def f", params)).samples]
    assert made == [stops]
    assert cut == [text[: min(text.find(s) for s in stops if s in text)] for text in texts]
    assert len(set(map(len, cut))) > 1
