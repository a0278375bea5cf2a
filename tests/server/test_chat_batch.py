"""`/v1/chat/completions/batch`: one choice per conversation, the same as in a request of its
own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import ASK, TOOLS, post
from tests.waits import until

pytestmark = pytest.mark.asyncio

PATH, SINGLE = "/v1/chat/completions/batch", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "pyhelp", "seed": 3, "max_tokens": 12}
TALKS: list[list[dict[str, Any]]] = [
    ASK,
    [{"role": "user", "content": "How is JSON read?"}],
    [*ASK, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And then?"}],
]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"regex": "[ab]{3}", "echo": True},
        {"tools": [], "n": 1, "stream": False},
    ],
)
async def test_each_choice_is_that_of_a_request_of_its_own(more: dict[str, Any]) -> None:
    async with served(num_pages=256) as (engine, client):
        answer = await post(client, PATH, BODY | more | {"messages": TALKS})
        alone = [await post(client, SINGLE, BODY | more | {"messages": one}) for one in TALKS]
        assert not engine.stats().pages_held_by_requests
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    for index, one in enumerate(alone):
        choice = answer["choices"][index]
        expected = one["choices"][0] | {"index": index}
        for each in (choice, expected):
            told = each.pop("logprobs")
            each["tokens"] = told and [place["token"] for place in told["content"]]
        assert choice == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum([one["usage"][name] for one in alone])
    assert answer["object"] == "chat.completion"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ASK}, "messages[0]"),
    ({"messages": [ASK] * 4}, "messages"),
    ({"messages": [ASK, []]}, "messages[1]"),
    ({"messages": [ASK, [{"role": "user", "content": 5}]]}, "messages[1]"),
    ({"messages": [ASK, [{"role": "user", "content": "a" * 30_000}]]}, "messages[1]"),
    ({"stream": True}, "stream"),
    ({"n": 2}, "n"),
    ({"tools": TOOLS}, "tools"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"temperature": -1}, "temperature"),
]


async def test_what_is_wrong_is_named_by_its_place() -> None:
    settings = ServerSettings(max_prompts=3)
    async with served(settings, num_pages=256) as (engine, client):
        for wrong, param in WRONG:
            answer = await client.post(PATH, json=BODY | {"messages": TALKS} | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert param in error["message"]
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert not engine.stats().num_running


async def test_a_client_that_leaves_ends_all_of_them() -> None:
    async with served(num_pages=512) as (engine, client):
        body = BODY | {"messages": TALKS, "max_tokens": 700, "ignore_eos": True}
        call = asyncio.create_task(client.post(PATH, json=body))
        await until(lambda: engine.stats().tokens_generated_total >= 20)
        call.cancel()
        await until(lambda: not engine.stats().num_running)
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert engine.stats().tokens_generated_total < 2000
