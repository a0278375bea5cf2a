"""Lists of prompts don't nest: the error names the argument and index of a nested one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, InvalidPromptError, SamplingParams
from aioserve.testing import FakeModel, check_invariants, run_simulated
from tests.tiers import examples

PARAMS = SamplingParams(max_tokens=2, temperature=0)
IDS = st.lists(st.integers(1, 50), min_size=1, max_size=3)
PROMPTS = IDS | IDS.map(tuple) | IDS.map(np.array)
NESTED = st.recursive(
    st.lists(PROMPTS | st.text(max_size=2), min_size=1, max_size=2),
    lambda inner: st.lists(inner, min_size=1, max_size=2),
    max_leaves=4,
)


@settings(max_examples=examples(20))
@given(st.lists(PROMPTS, max_size=4), NESTED, st.data())
def test_a_nested_list_anywhere_among_prompts_is_refused_by_its_place(
    flat: list[Any], nested: list[Any], data: Any
) -> None:
    place = data.draw(st.integers(0, len(flat)))
    prompts = [*flat[:place], nested, *flat[place:]]
    told = rf"^prompts\[{place}\] must be a str, token ids or messages, got list of "

    async def main() -> None:
        async with Engine(FakeModel()) as engine:
            for call in (engine.embed, engine.generate):
                with pytest.raises(InvalidPromptError, match=told) as refused:
                    await call(prompts)
                assert refused.value.argument == f"prompts[{place}]"
            if flat:
                completions: Any = await engine.generate(flat, PARAMS)
                assert len(completions) == len(flat)
        check_invariants(engine)

    run_simulated(main)


@settings(max_examples=examples(20))
@given(NESTED)
def test_a_list_of_prompts_is_no_prompt_of_a_call_that_takes_one(nested: list[Any]) -> None:
    async def main() -> None:
        async with Engine(FakeModel()) as engine:
            told = "^prompt must be a str, token ids or messages, got list of "
            with pytest.raises(InvalidPromptError, match=told):
                engine.stream(nested, PARAMS)
            for call in (engine.beam_search, engine.encode):
                with pytest.raises(InvalidPromptError, match=told):
                    await call(nested)
            with pytest.raises(InvalidPromptError, match=told):
                await engine.score(nested, [1])
            told = "^continuation must be a str or token ids, got list of "
            with pytest.raises(InvalidPromptError, match=told):
                await engine.score([1], nested)

    run_simulated(main)


class Changing(list[Any]):
    """Changes its answer each time."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        Changing.asked += 1
        if Changing.asked % 3 == 0:
            raise KeyError("planted")
        return ["a"] if Changing.asked % 2 else 1


def test_a_list_that_says_something_else_each_time_is_refused_by_name() -> None:
    async def main() -> None:
        async with Engine(FakeModel()) as engine:
            for _ in range(12):
                with pytest.raises(InvalidPromptError, match="prompt"):
                    await engine.generate([[1], Changing([None])], PARAMS)
        check_invariants(engine)

    run_simulated(main)


def test_what_fails_of_several_prompts_is_noted_with_its_place() -> None:
    async def main() -> None:
        async with Engine(FakeModel()) as engine:
            with pytest.raises(InvalidPromptError, match="token ids") as failed:
                await engine.generate([[1], [-1]], PARAMS)
            assert failed.value.__notes__ == ["of prompts[1]"]

    run_simulated(main)
