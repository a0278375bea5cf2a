"""Everything awaited of an engine ends when the engine is closed, and says why."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioserve import (
    ChatStream,
    Engine,
    EngineClosedError,
    SamplingParams,
    StructuredOutput,
    TokenStream,
)

WORDS = "y " * 600
"""Text long enough to be encoded on a thread."""
MESSAGES = [{"role": "user", "content": "Count."}]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
DIGITS = SamplingParams(max_tokens=200, structured_output=StructuredOutput(regex="[0-9]+"))


async def batches(engine: Engine) -> None:
    stream = engine.stream("x", ENDLESS)
    while await stream.batch():
        pass


async def tokens(engine: Engine) -> None:
    async for _ in engine.stream("x", ENDLESS):
        pass


async def deltas(engine: Engine) -> None:
    async for _ in engine.chat(MESSAGES, ENDLESS):
        pass


async def delta_batches(engine: Engine) -> None:
    stream = engine.chat(MESSAGES, ENDLESS)
    while await stream.batch():
        pass


AWAITED: dict[tuple[type, str], list[Callable[[Engine], Awaitable[Any]]]] = {
    (Engine, "generate"): [
        lambda engine: engine.generate("x", ENDLESS),
        lambda engine: engine.generate(WORDS, ENDLESS),
        lambda engine: engine.generate(MESSAGES, ENDLESS),
        lambda engine: engine.generate("x", DIGITS),
        lambda engine: engine.generate("x", SamplingParams(n=4, max_tokens=200, ignore_eos=True)),
    ],
    (Engine, "beam_search"): [
        lambda engine: engine.beam_search("x", max_tokens=200, ignore_eos=True),
        lambda engine: engine.beam_search(WORDS, max_tokens=200, ignore_eos=True),
    ],
    (Engine, "score"): [lambda engine: engine.score(WORDS, "y" * 9)],
    (Engine, "score_each"): [lambda engine: engine.score_each(WORDS, ["a", "b"] * 200)],
    (Engine, "select"): [lambda engine: engine.select(WORDS, ["a", "b"] * 200)],
    (Engine, "embed"): [lambda engine: engine.embed([WORDS] * 200)],
    (Engine, "embed_counted"): [lambda engine: engine.embed_counted([WORDS] * 200)],
    (Engine, "encode"): [
        lambda engine: engine.encode("y " * 10_000),
        lambda engine: engine.encode("y " * 40_000),
        lambda engine: engine.encode(MESSAGES),
        lambda engine: engine.encode("y " * 10_000, add_special_tokens=False),
    ],
    (TokenStream, "started"): [lambda engine: engine.stream(WORDS, ENDLESS).started()],
    (TokenStream, "batch"): [batches],
    (TokenStream, "__anext__"): [tokens],
    (ChatStream, "started"): [lambda engine: engine.chat(MESSAGES, ENDLESS).started()],
    (ChatStream, "batch"): [delta_batches],
    (ChatStream, "__anext__"): [deltas],
    (ChatStream, "completion"): [lambda engine: engine.chat(MESSAGES, ENDLESS).completion()],
}
ENDS_WITHOUT_ERROR = {
    (Engine, "__aenter__"): "is told of a close by `tests/attacks/test_life.py`",
    (Engine, "__aexit__"): "closes",
    (Engine, "relevance"): "computes what `embed` does, and pyhelp is no reranker",
    (Engine, "drain"): "returns when nothing is left, as after a close",
    (TokenStream, "__aenter__"): "waits for nothing",
    (TokenStream, "__aexit__"): "waits for nothing",
    (TokenStream, "aclose"): "waits for nothing",
    (ChatStream, "__aenter__"): "waits for nothing",
    (ChatStream, "__aexit__"): "waits for nothing",
    (ChatStream, "aclose"): "waits for nothing",
}
CASES = [
    pytest.param(call, turns, id=f"{owner.__name__}.{name}-{number}-{turns}")
    for (owner, name), calls in AWAITED.items()
    for number, call in enumerate(calls)
    for turns in (0, 1, 3, 20)
]


def test_no_method_that_is_awaited_is_left_out() -> None:
    awaited = {
        (owner, name)
        for owner in (Engine, TokenStream, ChatStream)
        for name, method in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if not name.startswith("_") or name.startswith("__")
    }
    assert awaited == AWAITED.keys() | ENDS_WITHOUT_ERROR.keys()


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("call", "turns"), CASES)
@pytest.mark.asyncio
async def test_what_is_awaited_ends_when_the_engine_is_closed(
    call: Callable[[Engine], Awaitable[Any]], turns: int
) -> None:
    """Includes an engine that is closed before the awaiting task has run."""
    async with Engine("pyhelp", max_num_batched_tokens=64) as engine:

        async def wait() -> None:
            await call(engine)

        task = asyncio.create_task(wait())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.__aexit__(None, None, None)
        await asyncio.wait([task])
        # Quick calls have their results; the others raise the reason.
        assert task.exception() is None or isinstance(task.exception(), EngineClosedError)


@pytest.mark.asyncio
async def test_a_drain_ends_with_a_close() -> None:
    async with Engine("pyhelp") as engine:
        stream = engine.stream("x", ENDLESS)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        await engine.__aexit__(None, None, None)
        assert await drained == 0
        with pytest.raises(EngineClosedError):
            await stream.batch(1000)


@pytest.mark.asyncio
async def test_a_deadline_of_a_drain_holds_for_prompts_that_are_only_encoded() -> None:
    async with Engine("pyhelp") as engine:
        encoded = asyncio.create_task(engine.encode("y " * 40_000))
        await asyncio.sleep(0)
        assert await engine.drain(0) == 0
        with pytest.raises(EngineClosedError, match="drained"):
            await encoded
