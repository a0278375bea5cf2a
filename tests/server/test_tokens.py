"""`/tokenize` and `/detokenize`, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import served
from tests.server.talking import ASK, TOOLS, post, scripted

pytestmark = pytest.mark.asyncio
TEXT = "json.dumps(é)"


async def test_tokens_are_those_that_a_request_has() -> None:
    async with served(num_pages=256) as (engine, client):
        answer = await post(client, "/tokenize", {"prompt": TEXT, "return_token_strs": True})
        bare = await post(client, "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
        back = await post(client, "/detokenize", {"tokens": answer["tokens"]})
        long = TEXT * 100
        many = await post(client, "/tokenize", {"prompt": long})
        assert answer["tokens"] == engine.tokenizer.encode(TEXT)
        assert bare["tokens"] == engine.tokenizer.encode(TEXT, add_special_tokens=False)
        assert many["tokens"] == engine.tokenizer.encode(long)
        assert answer["max_model_len"] == engine.limits.max_model_len
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert back["prompt"] == TEXT


async def test_messages_become_the_prompt_of_their_answer() -> None:
    async with scripted("Rain.") as (_, client):
        body = {"messages": ASK, "tools": TOOLS}
        tokens = await post(client, "/tokenize", body)
        chat = {"model": "scripted", "seed": 0} | body
        answer = await post(client, "/v1/chat/completions", chat)
    assert tokens["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a " * 30_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": ASK, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": ASK, "model": "other"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 100_000}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: Any, param: str) -> None:
    async with served(num_pages=256) as (_, client):
        answer = await client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
