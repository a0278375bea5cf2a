"""`allowed_tools`: the model sees some of the tools, and may call one of them, or must."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import served
from tests.server.talking import CHAT_BODY, TOOLS, post, scripted

pytestmark = pytest.mark.asyncio

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MOVE = '<tool_call>{"name": "move", "arguments": {"to": "north"}}</tool_call>'


def of_chat(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return CHAT_BODY | {"tools": TOOLS, "tool_choice": choice}


def of_responses(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", **one["function"], "strict": False} for one in TOOLS]
    allowed = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    return {"model": "scripted", "input": "North?", "tools": tools, "tool_choice": choice}


async def test_the_model_hears_of_these_alone() -> None:
    async with scripted(MOVE) as (_, client):
        one = await post(client, CHAT, CHAT_BODY | {"tools": TOOLS[1:]})
        some = await post(client, CHAT, of_chat("auto", "move"))
        response = await post(client, RESPONSES, of_responses("auto", "move"))
        every = await post(client, CHAT, CHAT_BODY | {"tools": TOOLS})
    assert some["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert some["usage"]["prompt_tokens"] < every["usage"]["prompt_tokens"]
    assert some["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "move"
    assert response["output"][-1]["name"] == "move"
    assert response["tool_choice"]["type"] == "allowed_tools"


async def test_one_of_these_must_be_called() -> None:
    async with served(num_pages=256) as (_, client):
        real = {"model": "pyhelp", "temperature": 0, "parallel_tool_calls": False}
        body = of_chat("required", "move") | real | {"max_tokens": 64}
        answer = await post(client, CHAT, body)
        body = of_responses("required", "move") | real | {"max_output_tokens": 64}
        response = await post(client, RESPONSES, body)
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"move"}
    assert response["output"][0]["name"] == "move"


@pytest.mark.parametrize("names", [(), ("gone",), ("move", "gone")])
async def test_what_is_allowed_must_be_there(names: tuple[str, ...]) -> None:
    async with scripted(MOVE) as (_, client):
        for path, of in ((CHAT, of_chat), (RESPONSES, of_responses)):
            answer = await client.post(path, json=of("auto", *names))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_no_more_are_allowed_than_there_may_be() -> None:
    async with scripted(MOVE) as (_, client):
        for path, of in ((CHAT, of_chat), (RESPONSES, of_responses)):
            assert (await client.post(path, json=of("auto", *["move"] * 128))).status_code == 200
            answer = await client.post(path, json=of("auto", *["move"] * 129))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
            assert "at most 128 tools" in answer.text
