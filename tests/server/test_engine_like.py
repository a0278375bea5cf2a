"""A server needs only an `EngineLike`: it serves a fake engine like `Engine`."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from aioserve import ChatStream, Engine, EngineLike, TokenStream
from aioserve.engine.interface import ChatStreamLike, TokenStreamLike
from aioserve.server import ServerSettings, create_app, drain
from aioserve.testing import FakeModel
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fake_streams import FakeChatStream, FakeTokenStream
from tests.server.serving import client_of
from tests.server.talking import (
    ASK,
    TOOLS,
    chat_joined,
    chat_whole,
    completions_joined,
    events_of,
    post,
)
from tests.waits import until

COUNTED: dict[str, Any] = {"model": "fake", "messages": ASK}
ANSWER = "It rains, as ever: 3 \u00b0C."


def typed(
    engine: Engine, fake: FakeEngine, tokens: TokenStream, chat: ChatStream
) -> tuple[EngineLike, EngineLike, TokenStreamLike, ChatStreamLike]:
    """Let pyright check that these fulfil the contract."""
    return engine, fake, tokens, chat


def members(contract: type) -> dict[str, Any]:
    """Public members of a contract, including those of its bases."""
    named = {name: one for kind in reversed(contract.__mro__) for name, one in vars(kind).items()}
    return {
        name: one
        for name, one in named.items()
        if (not name.startswith("_") or name == "__aiter__")
        and (isinstance(one, property) or inspect.isfunction(one))
    }


@pytest.mark.parametrize(
    ("kind", "contract"),
    [
        (Engine, EngineLike),
        (FakeEngine, EngineLike),
        (TokenStream, TokenStreamLike),
        (FakeTokenStream, TokenStreamLike),
        (ChatStream, ChatStreamLike),
        (FakeChatStream, ChatStreamLike),
    ],
)
def test_each_implementation_has_what_the_contract_says(kind: type, contract: type) -> None:
    wanted = members(contract)
    assert {"close", "__aiter__"} <= wanted.keys() or {"facts", "chat"} <= wanted.keys()
    for name, member in wanted.items():
        if isinstance(member, property):
            continue  # `config` is an attribute of each object
        own = getattr(kind, name)
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(member), name
        # `Engine` lists each option as a parameter.
        own_parameters = inspect.signature(inspect.unwrap(own)).parameters
        for parameter in inspect.signature(member).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            found = own_parameters[parameter.name]
            assert (found.kind, found.default) == (parameter.kind, parameter.default), name


def test_an_engine_that_was_not_entered_has_a_state_and_no_facts() -> None:
    for engine in (Engine(FakeModel()), FakeEngine()):
        assert engine.state == "new"
        assert engine.config.page_size == 16
        with pytest.raises(Exception, match="the engine is new"):
            _ = engine.facts


@asynccontextmanager
async def served_fake(
    answer: str = ANSWER, settings: ServerSettings | None = None, **facts: Any
) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    engine = FakeEngine(answer, **facts)
    async with engine, client_of(create_app(engine, settings)) as client:
        yield engine, client


@pytest.mark.asyncio
async def test_both_answer_with_the_same_text() -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 12}
    async with Engine(FakeModel(answers=ANSWER)) as engine, client_of(create_app(engine)) as client:
        real = await post(client, "/v1/chat/completions", body | {"model": "fake"})
    async with served_fake() as (_, client):
        fake = await post(client, "/v1/chat/completions", body | {"model": "fake"})
    assert real.keys() == fake.keys()
    for name in ("object", "model"):
        assert real[name] == fake[name]
    assert real["choices"] == fake["choices"]
    assert real["choices"][0]["message"]["content"] == ANSWER[:12]


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [{}, {"n": 3, "max_tokens": 5}, {"return_token_ids": True}])
async def test_streams_and_whole_answers_say_the_same(more: dict[str, Any]) -> None:
    async with served_fake() as (engine, client):
        chat = {"model": "fake", "messages": ASK, "logprobs": True, "top_logprobs": 2, **more}
        whole = await post(client, "/v1/chat/completions", chat)
        events = await post(client, "/v1/chat/completions", chat | {"stream": True})
        assert chat_joined(events) == chat_whole(whole)
        text = {"model": "fake", "prompt": ["a", "b\u00e9"], "logprobs": 1, "echo": True, **more}
        whole = await post(client, "/v1/completions", text)
        events = await post(client, "/v1/completions", text | {"stream": True})
        joined = completions_joined(events)
        assert joined == {choice["index"]: choice for choice in whole["choices"]}
        assert engine.stats().num_running == 0
    assert [one["text"][:1] for one in whole["choices"]] == ["a"] * (more.get("n") or 1) + ["b"] * (
        more.get("n") or 1
    )


@pytest.mark.asyncio
async def test_the_other_apis_answer_too() -> None:
    async with served_fake() as (_, client):
        given = await post(client, "/v1/responses", {"input": "What's the weather?"})
        assert given["output"][0]["content"][0]["text"] == ANSWER
        given = await post(client, "/v1/messages", COUNTED | {"max_tokens": 99})
        assert [one["text"] for one in given["content"]] == [ANSWER]
        counted = await post(client, "/v1/messages/count_tokens", COUNTED)
        assert counted["input_tokens"] == given["usage"]["input_tokens"]
        given = await post(client, "/api/chat", {"messages": ASK, "model": "fake", "stream": False})
        assert given["message"]["content"] == ANSWER
        given = await client.post("/api/generate", json={"model": "fake", "prompt": "Weather"})
        lines = [httpx.Response(200, content=one).json() for one in given.text.splitlines()]
        assert "".join([line["response"] for line in lines]) == ANSWER
        beams = {"prompt": "a", "use_beam_search": True, "n": 2}
        given = await post(client, "/v1/completions", beams)
        assert [one["text"] for one in given["choices"]] == [ANSWER[:16], ANSWER[:15]]
        batch = {"model": "fake", "messages": [ASK, ASK]}
        given = await post(client, "/v1/chat/completions/batch", batch)
        assert [one["message"]["content"] for one in given["choices"]] == [ANSWER, ANSWER]


@pytest.mark.asyncio
async def test_embeddings_and_ranks_are_those_of_the_engine() -> None:
    documents = ["sun", "rain in Oslo"]
    async with served_fake() as (engine, client):
        given = await post(client, "/v1/embeddings", {"input": documents})
        vectors, usage = await engine.embed_counted(documents)
        assert [one["embedding"] for one in given["data"]] == vectors.tolist()
        assert given["usage"]["prompt_tokens"] == usage.prompt_tokens
        given = await post(client, "/rerank", {"query": "rain", "documents": documents})
        assert given["results"][0]["document"] == {"text": "rain in Oslo"}
    async with served_fake(tells_relevance=True) as (_, client):
        given = await post(client, "/rerank", {"query": "rain", "documents": documents})
        assert [one["relevance_score"] for one in given["results"]] == [1.0, 0.0]


@pytest.mark.asyncio
async def test_what_is_asked_of_the_model_comes_from_its_facts() -> None:
    async with served_fake(name="some/model") as (engine, client):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one["max_model_len"]) for one in listed] == [("some/model", 1024)]
        tags = (await client.get("/api/tags")).json()["models"]
        assert tags[0]["details"]["family"] == "fake"
        assert tags[0]["capabilities"] == ["completion", "thinking"]
        given = await post(client, "/tokenize", {"prompt": "h\u00e9", "return_token_strs": True})
        assert given["tokens"] == list("h\u00e9".encode())
        given = await post(client, "/detokenize", {"tokens": given["tokens"]})
        assert given["prompt"] == "h\u00e9"
        refused = await client.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        info = (await client.get("/server_info")).json()
        assert (info["num_pages"], info["engine"]["page_size"]) == (64, engine.config.page_size)
    async with served_fake(tokenizer=None, generates=False) as (_, client):
        refused = await client.post("/tokenize", json={"prompt": "a"})
        assert refused.json()["error"]["code"] == "no_tokenizer"
        assert (await client.get("/api/tags")).json()["models"][0]["capabilities"] == ["embedding"]


@pytest.mark.asyncio
async def test_what_the_engine_refuses_is_named_as_the_api_names_it() -> None:
    async with served_fake() as (engine, client):
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": ASK}),
        ):
            refused = await client.post(path, json=body | {"stop": ["x"]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")
        assert engine.stats().num_running == 0


@pytest.mark.asyncio
async def test_metrics_count_what_observers_are_told() -> None:
    async with served_fake() as (_, client):
        await post(client, "/v1/completions", {"prompt": "abc", "max_tokens": 7})
        text = (await client.get("/metrics")).text
    for name, value in (
        ('aioserve_requests_total{finish_reason="length",tenant=""}', 1.0),
        ('aioserve_request_tokens_total{kind="prompt",tenant=""}', 3.0),
        ('aioserve_request_tokens_total{kind="generated",tenant=""}', 7.0),
        ("aioserve_generated_tokens_total", 7.0),
        ("aioserve_max_model_len_tokens", 1024.0),
    ):
        assert re.search(rf"^{re.escape(name)} {value}$", text, re.MULTILINE), name


@pytest.mark.asyncio
async def test_a_drain_waits_for_answers_and_ends_those_that_are_late() -> None:
    async with FakeEngine(stalls_after=3) as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            assert (await client.get("/ready")).status_code == 200
            body = {"prompt": "a", "max_tokens": 9, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                await until(lambda: engine.stats().num_running)
                ending = asyncio.create_task(drain(app, 0.01))
                await until(lambda: engine.state == "draining")
                for path, status in (("/ready", 503), ("/health", 200)):
                    assert (await client.get(path)).status_code == status
                text = (await answer.aread()).decode()
            assert await ending == 1
        assert "[DONE]" not in text
        assert events_of(text)[-1]["error"]["code"]


@pytest.mark.asyncio
async def test_a_client_that_leaves_ends_its_request() -> None:
    async with FakeEngine(stalls_after=3) as engine, client_of(create_app(engine)) as client:
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body):
            await until(lambda: engine.stats().num_running)
        await until(lambda: not engine.stats().num_running)
