"""Objects that own something refuse to be copied: the collector would end it with the copy. Values
can be copied."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aioserve import Engine, SamplingParams
from tests.attacks.engines import LONG, SHORT, a_model

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


@pytest.mark.sampled(1)
@pytest.mark.asyncio
@pytest.mark.parametrize("way", COPIES)
async def test_an_engine_and_a_stream_are_not_copied_and_go_on(way: str) -> None:
    async with Engine(a_model()) as engine, engine.stream([1], LONG) as stream:
        for owner in (engine, stream):
            with pytest.raises(TypeError, match=f"an? {type(owner).__name__} can't be copied"):
                COPIES[way](owner)
        gc.collect()
        await anext(stream)
        assert await engine.generate([1], SHORT)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", COPIES)
async def test_values_that_an_engine_gives_are_copied(way: str) -> None:
    async with Engine("pyhelp", num_pages=64) as engine:
        params = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1)
        completion = await engine.generate("import os", params)
        chat = await engine.chat([{"role": "user", "content": "What is a list?"}]).completion()
        values = [completion, chat, params, engine.stats(), engine.limits, engine.config]
        assert [COPIES[way](one) for one in values] == values


@pytest.mark.asyncio
async def test_an_engine_shows_its_model_and_where_it_is_in_its_life() -> None:
    engine = Engine("pyhelp", num_pages=64)
    assert repr(engine) == "Engine('pyhelp', new)"
    async with engine:
        assert repr(engine) == "Engine('pyhelp', open)"
    assert repr(engine) == "Engine('pyhelp', closed)"
    assert repr(Engine(a_model())) == f"Engine({type(a_model()).__name__!r}, new)"
