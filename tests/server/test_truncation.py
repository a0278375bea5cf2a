"""`truncate_prompt_tokens` at every endpoint that takes a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.serving import served
from tests.server.talking import ASK, chat_joined, chat_whole, completions_joined, post

pytestmark = pytest.mark.asyncio

LONG = "import json, os, re and what else there is " * 30
PLAIN: dict[str, Any] = {"model": "pyhelp", "seed": 3, "max_tokens": 8}


async def test_completions_have_the_last_tokens_or_the_first() -> None:
    async with served(num_pages=256) as (engine, client):
        ids = await engine.encode(LONG, truncate_prompt_tokens=512)
        for side, left in (("left", ids[-6:]), ("right", ids[:6])):
            cut = {"prompt": LONG, "truncate_prompt_tokens": 6, "truncation_side": side}
            body = PLAIN | cut | {"echo": True, "return_token_ids": True}
            answer = await post(client, "/v1/completions", body)
            events = await post(client, "/v1/completions", body | {"stream": True})
            plain = await post(client, "/v1/completions", PLAIN | {"prompt": left})
            (choice,) = answer["choices"]
            assert choice["prompt_token_ids"] == left
            assert choice["text"] == engine.tokenizer.decode(left) + plain["choices"][0]["text"]
            assert completions_joined(events)[0] == choice
            assert answer["usage"]["prompt_tokens"] == 6


async def test_minus_one_leaves_room_for_the_answer() -> None:
    async with served(num_pages=256) as (engine, client):
        most = engine.limits.max_model_len
        body = PLAIN | {"prompt": LONG * 40, "max_tokens": 9}
        refused = await client.post("/v1/completions", json=body)
        answer = await post(client, "/v1/completions", body | {"truncate_prompt_tokens": -1})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert answer["usage"]["prompt_tokens"] == most - 9


async def test_a_conversation_is_cut_when_it_is_rendered() -> None:
    path = "/v1/chat/completions"
    messages = [{"role": "user", "content": LONG}]
    async with served(num_pages=256) as (engine, client):
        body = PLAIN | {"messages": messages, "truncate_prompt_tokens": 12}
        answer = await post(client, path, body)
        events = await post(client, path, body | {"stream": True})
        ids = await engine.encode(messages, truncate_prompt_tokens=12)
        short = await post(client, "/v1/completions", PLAIN | {"prompt": ids})
    assert chat_joined(events) == chat_whole(answer)
    assert answer["usage"]["prompt_tokens"] == 12
    assert answer["choices"][0]["message"]["content"] == short["choices"][0]["text"]


async def test_what_is_embedded_has_the_first_tokens() -> None:
    messages = [{"role": "user", "content": LONG * 40}]
    async with served(num_pages=256) as (engine, client):
        ids = (await engine.encode(LONG, truncate_prompt_tokens=512, truncation_side="right"))[:5]
        cut = {"model": "pyhelp", "truncate_prompt_tokens": 5}
        answer = await post(client, "/v1/embeddings", cut | {"input": [LONG, "re"]})
        left = cut | {"input": LONG, "truncation_side": "left"}
        other = await post(client, "/v1/embeddings", left)
        talk = await post(client, "/v1/embeddings", cut | {"messages": messages})
        scores = await post(client, "/score", cut | {"text_1": LONG, "text_2": LONG + "!"})
        ranked = await post(client, "/rerank", cut | {"query": LONG, "documents": [LONG + "!"]})
        expected = await engine.embed([ids, "re"])
    found = np.array([one["embedding"] for one in answer["data"]])
    assert np.allclose(found, expected, atol=1e-5)
    assert not np.allclose(other["data"][0]["embedding"], found[0], atol=1e-3)
    assert talk["usage"]["prompt_tokens"] == 5
    assert scores["data"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "json"}),
    ("/v1/chat/completions", {"messages": ASK}),
    ("/v1/responses", {"input": "json"}),
    ("/v1/embeddings", {"input": "json"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
]


@pytest.mark.parametrize(("path", "asked"), PATHS)
async def test_what_is_wrong_is_named(path: str, asked: dict[str, Any]) -> None:
    async with served(num_pages=64) as (_, client):
        for wrong, param in (
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
            ({"truncation_side": "left"}, "truncation_side"),
            ({"truncate_prompt_tokens": 2, "truncation_side": "up"}, "truncation_side"),
        ):
            answer = await client.post(path, json={"model": "pyhelp"} | asked | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
