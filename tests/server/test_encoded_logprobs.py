"""Long lists of log-probabilities are written in parts, with the same content as at once."""

from __future__ import annotations

import asyncio
import json
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine
from aioserve.request import Logprobs, Token, TopLogprob
from aioserve.server import create_app
from aioserve.server.json_parts import parts_of
from aioserve.server.openai import logprobs as module
from aioserve.server.openai.logprobs import (
    EncodedLogprobs,
    TextOffsets,
    TokenTexts,
    all_chat_logprobs,
    chat_logprobs,
)
from aioserve.server.pace import Pace
from tests.attacks.held_loop import assert_loop_is_free
from tests.server.serving import client_of

found = st.builds(
    Logprobs,
    st.floats(-50, 0),
    st.lists(st.builds(TopLogprob, st.integers(0, 400), st.floats(-50, 0)), max_size=3).map(tuple),
)
tokens = st.lists(st.tuples(st.integers(0, 400), found | st.none()), max_size=20)


async def written(value: object) -> bytes:
    return b"".join([part async for part in parts_of(value)])


@given(prompt=tokens, own=tokens, entries=st.integers(1, 9))
@pytest.mark.asyncio
async def test_parts_joined_are_the_whole(
    prompt: list[tuple[int, Logprobs | None]],
    own: list[tuple[int, Logprobs | None]],
    entries: int,
) -> None:
    async with Engine("pyhelp") as engine:
        texts = TokenTexts(engine.facts)
        whole = TextOffsets(texts).logprobs_of([*prompt, *own])
        with mock.patch.object(module, "UNITS_AT_ONCE", entries):
            first = await EncodedLogprobs.of(texts, prompt, Pace())
            second = await EncodedLogprobs.of(texts, own, Pace(), chars=first.chars)
            joined = await written(first.long_with(second))
            drawn = [Token(id, "", place, 0, lp) for place, (id, lp) in enumerate(own)]
            of_chat = await written(all_chat_logprobs(texts, drawn, 2, Pace()))
        assert joined == msgspec.json.encode(whole)
        assert of_chat == msgspec.json.encode(chat_logprobs(texts, drawn, 2))
        plain = first.with_more(TextOffsets(texts, chars=first.chars).logprobs_of(own))
        assert msgspec.json.encode(plain) == msgspec.json.encode(whole)


@pytest.mark.asyncio
async def test_the_loop_has_turns_while_a_long_list_is_written() -> None:
    one = Logprobs(-1.0, tuple(TopLogprob(id, -1.0) for id in range(5)))
    long, turns = [(7, one)] * 30_000, 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Engine("pyhelp") as engine:
        counting = asyncio.create_task(count())
        await EncodedLogprobs.of(TokenTexts(engine.facts), long, Pace())
        counting.cancel()
    assert turns >= 6 * len(long) // module.UNITS_AT_ONCE


@pytest.mark.asyncio
@pytest.mark.clock
async def test_echo_with_logprobs_is_the_same_streamed_and_whole_and_holds_nobody_up() -> None:
    async with Engine("pyhelp") as engine, client_of(create_app(engine)) as client:
        body = {
            "model": "pyhelp",
            "prompt": "y " * 500,
            "max_tokens": 3,
            "n": 4,
            "echo": True,
            "logprobs": 5,
            "seed": 1,
            "temperature": 1,
        }

        async def ask() -> None:
            whole = (await client.post("/v1/completions", json=body)).json()
            streamed = (await client.post("/v1/completions", json=body | {"stream": True})).text
            events = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
            pieces = [choice for event in events for choice in json.loads(event)["choices"]]
            for choice in whole["choices"]:
                its = [each for each in pieces if each["index"] == choice["index"]]
                assert "".join(each["text"] for each in its) == choice["text"]
                for name, values in choice["logprobs"].items():
                    told = [each["logprobs"][name] for each in its if each.get("logprobs")]
                    assert [value for values in told for value in values] == values

        await assert_loop_is_free(ask)
