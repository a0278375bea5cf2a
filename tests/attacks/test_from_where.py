"""Each method of an engine and a stream is called from where the reference says, and elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from aioserve import (
    AioserveError,
    Engine,
    EngineClosedError,
    InvalidPromptError,
    InvalidRequestError,
    Observer,
    TokenStream,
    WrongLoopError,
)
from aioserve.testing import check_invariants
from tests.attacks.engines import (
    LONG,
    NO_STREAM,
    SHORT,
    a_model,
    awaited,
    by_hand,
    list_of,
)
from tests.waits import until

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "engine-threads.md"


def chat(engine: Engine) -> None:
    """Call `Engine.chat`. It has passed all checks of where it is called when it looks for a chat
    template."""
    with pytest.raises(InvalidPromptError, match="has no chat template"):
        engine.chat([{"role": "user", "content": "x"}], SHORT)


async def relevance(engine: Engine) -> None:
    """Call `Engine.relevance`. It has passed these checks when it looks for a reranker."""
    with pytest.raises(InvalidRequestError, match="tells no relevance"):
        await engine.relevance([("a", "b")])


def fork(stream: TokenStream) -> None:
    """Call `TokenStream.fork`. It has passed these checks when it looks whether the stream goes
    on."""
    with suppress(InvalidRequestError):
        stream.fork(1)


class Watcher(Observer):
    """Observer without methods."""


CALLS: dict[str, Callable[[Engine, TokenStream], Any]] = {
    "Engine.__aenter__": lambda e, s: e.__aenter__(),
    "Engine.__aexit__": lambda e, s: e.__aexit__(None, None, None),
    "Engine.chat": lambda e, s: chat(e),
    "Engine.beam_search": lambda e, s: e.beam_search([1], beam_width=2, max_tokens=2),
    "Engine.config": lambda e, s: e.config,
    "Engine.facts": lambda e, s: e.facts,
    "Engine.default_params": lambda e, s: e.default_params,
    "Engine.says_sampling": lambda e, s: e.says_sampling,
    "Engine.template_reads": lambda e, s: e.template_reads("tools"),
    "Engine.reads_tool_calls": lambda e, s: e.reads_tool_calls,
    "Engine.reasons": lambda e, s: e.reasons,
    "Engine.calls_in_channels": lambda e, s: e.calls_in_channels,
    "Engine.drain": lambda e, s: e.drain(0),
    "Engine.dump": lambda e, s: e.dump(),
    "Engine.embed": lambda e, s: e.embed([1]),
    "Engine.generate": lambda e, s: e.generate([1], SHORT),
    "Engine.has_chat_template": lambda e, s: e.has_chat_template,
    "Engine.model_name": lambda e, s: e.model_name,
    "Engine.has_tokenizer": lambda e, s: e.has_tokenizer,
    "Engine.limits": lambda e, s: e.limits,
    "Engine.score": lambda e, s: e.score([1], [2]),
    "Engine.score_each": lambda e, s: e.score_each([1], [[2], [3]]),
    "Engine.select": lambda e, s: e.select([1], [[2], [3]]),
    "Engine.embed_counted": lambda e, s: e.embed_counted([[1], [2]]),
    "Engine.relevance": lambda e, s: relevance(e),
    "Engine.retrieval": lambda e, s: e.retrieval,
    "Engine.generates": lambda e, s: e.generates,
    "Engine.filled_in": lambda e, s: e.filled_in("a", "b"),
    "Engine.tells_relevance": lambda e, s: e.tells_relevance,
    "Engine.encode": lambda e, s: e.encode([1, 2]),
    "Engine.reset_prefix_cache": lambda e, s: e.reset_prefix_cache(),
    "Engine.observe": lambda e, s: e.observe(Watcher()),
    "Engine.state": lambda e, s: e.state,
    "Engine.stats": lambda e, s: e.stats(),
    "Engine.stream": lambda e, s: e.stream([1], SHORT).request_id,
    "Engine.tokenizer": lambda e, s: e.tokenizer.encode("x"),
    "TokenStream.__aenter__": lambda e, s: s.__aenter__(),
    "TokenStream.__aexit__": lambda e, s: s.__aexit__(None, None, None),
    "TokenStream.__aiter__": lambda e, s: aiter(s),
    "TokenStream.__anext__": lambda e, s: s.__anext__(),
    "TokenStream.aclose": lambda e, s: s.aclose(),
    "TokenStream.close": lambda e, s: s.close(),
    "TokenStream.finish_reason": lambda e, s: s.finish_reason,
    "TokenStream.finish_reasons": lambda e, s: s.finish_reasons,
    "TokenStream.prompt_logprobs": lambda e, s: s.prompt_logprobs,
    "TokenStream.prompt_token_ids": lambda e, s: s.prompt_token_ids,
    "TokenStream.request_id": lambda e, s: s.request_id,
    "TokenStream.batch": lambda e, s: s.batch(),
    "TokenStream.fork": lambda e, s: fork(s),
    "TokenStream.started": lambda e, s: s.started(),
    "TokenStream.stop_reason": lambda e, s: s.stop_reason,
    "TokenStream.stop_reasons": lambda e, s: s.stop_reasons,
    "TokenStream.timings": lambda e, s: s.timings,
    "TokenStream.usage": lambda e, s: s.usage,
}


def offered(kind: type) -> Iterator[str]:
    names = {name for one in kind.__mro__ if one is not object for name in vars(one)}
    for name in {"config", *names} if kind is Engine else names:
        if not name.startswith("_") or name.startswith("__a"):
            yield f"{kind.__name__}.{name}"


def documented() -> dict[str, tuple[str, str]]:
    """Return, for each method, from where it may be called while the engine is open, and after its
    end."""
    section = REFERENCE.read_text(encoding="utf-8").split("\n## Threads and event loops\n")[1]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", section.split("\n## ")[0], re.M)
    places = {}
    for names, *cells in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in places
            places[name] = tuple(cells)
    return places


def test_the_reference_says_of_every_method_from_where_it_may_be_called() -> None:
    expected = {*offered(Engine), *offered(TokenStream)}
    assert CALLS.keys() == expected
    assert documented().keys() == expected


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AioserveError, StopAsyncIteration) as error:
        return type(error).__name__
    return "works"


PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "another loop": lambda call: asyncio.run(awaited(call)),
    "no loop": by_hand,
    "trio": lambda call: trio.run(awaited, call),
}


@pytest.mark.sampled(19)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.asyncio
async def test_a_call_from_elsewhere_works_or_says_what_is_wrong(name: str, place: str) -> None:
    elsewhere, _ = documented()[name]
    async with Engine(a_model(), max_buffered_tokens=4) as engine:
        stream = engine.stream([1], LONG)
        await stream.started()
        call = CALLS[name]
        outcome = await asyncio.to_thread(
            outcome_of, lambda: PLACES[place](lambda: call(engine, stream))
        )
        assert outcome == {"yes": "works"}.get(elsewhere, elsewhere.strip("`"))
        # And nothing has changed here.
        ended = name in ("TokenStream.close", "TokenStream.aclose", "TokenStream.__aexit__")
        if ended:
            await until(lambda: stream.finish_reason)
        assert stream.finish_reason == ("abort" if ended else None)
        check_invariants(engine)
        assert len((await engine.generate([1], SHORT)).token_ids) == 4


@pytest.mark.sampled(21)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.asyncio
async def test_a_call_on_its_own_loop_works(name: str) -> None:
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], LONG)
        if name != "Engine.__aenter__":
            await awaited(lambda: CALLS[name](engine, stream))
        else:
            with pytest.raises(EngineClosedError, match="can be entered once"):
                await engine.__aenter__()
        stream.close()


@pytest.mark.sampled(27)
@pytest.mark.parametrize("place", ["its loop", *PLACES])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.asyncio
async def test_a_call_after_the_end_works_or_says_what_is_wrong(name: str, place: str) -> None:
    _, after = documented()[name]
    async with Engine(a_model()) as engine:
        stream = engine.stream([1], LONG)
        await anext(stream)
    with pytest.raises(EngineClosedError):
        await list_of(stream)
    call = CALLS[name]
    try:
        if place == "its loop":
            await awaited(lambda: call(engine, stream))
            outcome = "works"
        else:
            outcome = await asyncio.to_thread(
                outcome_of, lambda: PLACES[place](lambda: call(engine, stream))
            )
    except AioserveError as error:
        outcome = type(error).__name__
    if after == "as before" and place != "its loop":
        after = documented()[name][0]
    elif name in ("TokenStream.__anext__", "TokenStream.batch", "TokenStream.started"):
        after = "`EngineClosedError`"  # what ended the request
    assert outcome == {"yes": "works", "as before": "works"}.get(after, after.strip("`"))


BEFORE_ENTERING = ("Engine.config", "Engine.observe", "Engine.state", "Engine.__aexit__")
"""Methods that a new engine answers."""


def test_a_new_engine_says_that_it_was_not_entered() -> None:
    for name, call in CALLS.items():
        engine = Engine(a_model())
        if name.startswith("Engine") and name not in BEFORE_ENTERING:
            where = by_hand if name != "Engine.__aenter__" else PLACES["another loop"]
            outcome = outcome_of(lambda: where(lambda: call(engine, NO_STREAM)))  # noqa: B023
            if name == "Engine.__aenter__":
                assert outcome == "works"
                engine._lifecycle._state = "closed"  # its loop is gone
            else:
                assert outcome == "EngineClosedError", name


@pytest.mark.parametrize("place", ["no loop", "trio"])
def test_asyncio_alone_is_said_at_the_door_and_the_engine_can_still_be_entered(place: str) -> None:
    engine = Engine(a_model())
    with pytest.raises(WrongLoopError, match="needs asyncio"):
        PLACES[place](engine.__aenter__)

    async def main() -> None:
        async with engine:
            await engine.generate([1], SHORT)

    asyncio.run(main())


def test_an_engine_that_is_at_rest_shows_its_numbers_anywhere() -> None:
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(Engine(a_model()).__aenter__())
    loop.run_until_complete(engine.generate([1], SHORT))
    assert engine.stats().tokens_generated_total == 4
    assert engine.dump()["state"] == "open"
    loop.run_until_complete(engine.__aexit__(None, None, None))
    loop.close()
    assert asyncio.run(awaited(engine.stats)).tokens_generated_total == 4
