"""`stream_interval`: fewer chunks with the same content."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioserve import ConfigError, Engine
from aioserve.server import ServerSettings, create_app
from aioserve.testing import FakeModel
from tests.engine.scripted import ScriptedModel
from tests.server.event_checks import checked_message, checked_response, without_ids
from tests.server.event_checks import events_of as named_events_of
from tests.server.scripts import CALLS, TEMPLATE
from tests.server.talking import ASK, TOOLS, chat_joined, completions_joined, post
from tests.tiers import examples
from tests.waits import LIMIT_SECONDS

pytestmark = pytest.mark.asyncio

INTERVALS = (1, 2, 7, 1024)
ANSWERS = (
    CALLS,
    "It rains, as ever. " * 5,
    f"<think>I wonder\nwhat €</think>\n\n{CALLS} and so on",
    "<think>never closed  ",
    "",
)
FUNCTIONS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
]
ANTHROPIC = [{"name": "weather", "input_schema": {"type": "object"}}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def client_of(engine: Engine, interval: int) -> httpx.AsyncClient:
    app = create_app(engine, ServerSettings(stream_interval=interval, metrics=False, page=False))
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=LIMIT_SECONDS
    )


@asynccontextmanager
async def clients(
    model: Any, **options: Any
) -> AsyncIterator[tuple[Engine, Sequence[httpx.AsyncClient]]]:
    """Yield an engine, and a client of it for each interval."""
    async with Engine(model, **options) as engine:
        yield engine, [client_of(engine, interval) for interval in INTERVALS]
        assert not engine.stats().pages_held_by_requests


def drawn(count: int, **fields: st.SearchStrategy[Any]) -> list[dict[str, Any]]:
    """Bodies with some of these fields, for servers that live longer than one example."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=examples(count), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.fixed_dictionaries({}, optional=fields))
    def draw(body: dict[str, Any]) -> None:
        found.append(body)

    draw()
    return found


ANSWER_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 4),
    "n": st.integers(1, 3),
    "stop": st.lists(st.sampled_from(["a", "ev", "\n", "</", "€"]), max_size=2),
    "max_tokens": st.integers(1, 40),
    "return_token_ids": st.just(True),
}


def counts_of(events: list[Any]) -> list[int]:
    """Token counts without cached tokens, which the first of several equal requests doesn't
    have."""
    usage = events[-1]["usage"]
    return [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]


def ids_of(events: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        for piece in event["choices"]:
            found.setdefault(piece["index"], []).extend(piece.get("token_ids") or ())
    return found


async def test_completions_are_the_same_with_any_interval() -> None:
    prompts = st.lists(st.sampled_from(["json", "re", "é"]), min_size=1, max_size=2)
    more = {"prompt": prompts, "echo": st.booleans(), "logprobs": st.integers(0, 2)}
    async with clients("pyhelp", num_pages=256) as (_, all_clients):
        for body in drawn(20, **ANSWER_FIELDS, **more):
            asked = {"model": "pyhelp", "prompt": "json", "seed": 1} | body | STREAMED
            found = []
            for client in all_clients:
                events = await post(client, "/v1/completions", asked)
                joined = completions_joined(events)
                for choice in joined.values():
                    round_logprobs(choice["logprobs"])
                found.append((joined, ids_of(events), counts_of(events)))
            assert found == [found[0]] * len(found), asked


def round_logprobs(logprobs: Any) -> None:
    """Round log-probabilities: batches of other sizes add in another order."""
    if logprobs is not None:
        own = logprobs["token_logprobs"]
        logprobs["token_logprobs"] = [None if one is None else round(one, 3) for one in own]
        tops = logprobs["top_logprobs"]
        logprobs["top_logprobs"] = [None if one is None else sorted(one) for one in tops]


async def test_chat_is_the_same_with_any_interval() -> None:
    more = {"tools": st.just(TOOLS), "parallel_tool_calls": st.booleans()}
    async with clients(ScriptedModel(TEMPLATE, *ANSWERS)) as (_, all_clients):
        for body in drawn(30, **ANSWER_FIELDS, **more):
            asked = {"model": "scripted", "messages": ASK, "seed": 0} | body | STREAMED
            found = []
            for client in all_clients:
                events = await post(client, "/v1/chat/completions", asked)
                found.append((chat_joined(events), ids_of(events), counts_of(events)))
            assert found == [found[0]] * len(found), asked


@pytest.mark.parametrize("seed", range(len(ANSWERS)))
@pytest.mark.parametrize("max_tokens", [1, 13, 500])
async def test_responses_and_messages_are_the_same_with_any_interval(
    seed: int, max_tokens: int
) -> None:
    async with clients(ScriptedModel(TEMPLATE, ANSWERS[seed])) as (_, all_clients):
        body = {"model": "scripted", "stream": True}
        response = {"input": "Rain?", "max_output_tokens": max_tokens, "tools": FUNCTIONS}
        message = {"messages": ASK, "max_tokens": max_tokens, "tools": ANTHROPIC}
        await all_clients[0].post("/v1/responses", json=body | response)  # now it is cached
        found, counts = [], []
        for client in all_clients:
            texts = [
                (await client.post("/v1/responses", json=body | response)).text,
                (await client.post("/v1/messages", json=body | message)).text,
            ]
            told = checked_response(named_events_of(texts[0]))
            written = checked_message(named_events_of(texts[1]))
            found.append([told["status"], without_ids(told["output"]), told["usage"]])
            found[-1] += [without_ids(written["content"]), written["stop_reason"]]
            found[-1].append(written["usage"]["output_tokens"])
            counts.append([text.count("event: ") for text in texts])
    assert found == [found[0]] * len(found)
    assert all(few <= many for few, many in zip(counts[-1], counts[0], strict=True))


async def test_one_call_at_most_is_told_with_any_interval() -> None:
    async with clients(ScriptedModel(TEMPLATE, CALLS)) as (_, all_clients):
        for client in all_clients:
            response = {"input": "Rain?", "tools": FUNCTIONS, "parallel_tool_calls": False}
            body = {"model": "scripted", "stream": True} | response
            text = (await client.post("/v1/responses", json=body)).text
            told = checked_response(named_events_of(text))
            kinds = [item["type"] for item in told["output"]]
            assert kinds == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("interval", [1, 5, 1000])
async def test_all_chunks_but_the_first_and_the_last_have_as_many_tokens(
    interval: int, n: int
) -> None:
    async with Engine(FakeModel(num_pages=256), max_buffered_tokens=100) as engine:
        body = {"model": "fake", "prompt": [1, 2], "n": n, "max_tokens": 200, "seed": 1}
        body |= {"return_token_ids": True, "ignore_eos": True}
        client = client_of(engine, interval)
        body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
        events = await post(client, "/v1/completions", body | STREAMED)
    chunks = [piece["token_ids"] for event in events for piece in event["choices"]]
    sizes = [len(ids) for ids in chunks if ids]
    assert sum(sizes) == 200 * n
    assert max(sizes[:n]) < 5, "the first token waits for no other"
    # At most half of the buffered tokens are held back.
    least = min(interval, 50 // n)
    assert all(size >= least for size in sizes[n:-n])
    assert len(sizes) <= 2 * n + 200 * n / least


@pytest.mark.parametrize("interval", [1, 4])
async def test_counts_so_far_are_those_of_the_chunks_so_far(interval: int) -> None:
    async with Engine("pyhelp", num_pages=256) as engine:
        client = client_of(engine, interval)
        options = {"continuous_usage_stats": True, "include_usage": True}
        body = {"model": "pyhelp", "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
        body |= {"prompt": ["json", "re", "os"], "stream": True, "stream_options": options}
        events = await post(client, "/v1/completions", body)
    sent = 0
    for event in events:
        sent += sum(len(piece.get("token_ids") or ()) for piece in event["choices"])
        assert event["usage"]["completion_tokens"] == sent
    assert sent == 90


async def test_an_interval_is_checked() -> None:
    for wrong in (0, -1, 1025, 1.5, "2", True):
        with pytest.raises(ConfigError, match="stream_interval"):
            ServerSettings(stream_interval=wrong)  # pyright: ignore[reportArgumentType]
