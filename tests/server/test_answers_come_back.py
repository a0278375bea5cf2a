"""Answers of each API can be sent back: no part of a call is lost or refused.

Their templates take calls as published ones do.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from aioserve.server import ServerSettings
from tests.server.scripts import scripted
from tests.text.answering_templates import TEMPLATES

pytestmark = pytest.mark.asyncio

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
ASKED = "Is it wet there?"
RESULT = "It rains."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
MARKS = "{# <tool_call></tool_call> </think> #}"
ANSWERS = {
    "a call": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    "null": '<tool_call>{"name": "weather", "arguments": null}</tool_call>',
    "broken": '<tool_call>{"name": "weather", "arguments": {"city"; "Oslo"}}</tool_call>',
    "reasoning": (
        '<think>Oslo?</think>\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
        "</tool_call>"
    ),
    "two": 2 * '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\n',
    "text": "It is wet in Oslo.",
    "nothing": "",
}
"""Texts of the model, by kind."""


async def by_chat(post: Post) -> None:
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    body: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
    told = await post("/v1/chat/completions", {**body, "messages": turns})
    message = told["choices"][0]["message"]
    turns.append(message)
    for call in message.get("tool_calls") or ():
        turns.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
    if not message.get("tool_calls"):
        turns.append({"role": "user", "content": RESULT})
    await post("/v1/chat/completions", {**body, "messages": turns})


async def by_responses(post: Post, *, how: str = "whole") -> None:
    body = {"tools": [{"type": "function", "strict": False, **FUNCTION}]}
    asked = {"role": "user", "content": ASKED}
    told = await post("/v1/responses", {**body, "input": [asked]})
    output = told["output"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in output
        if item["type"] == "function_call"
    ] or [{"role": "user", "content": RESULT}]
    if how == "previous":
        more = {"previous_response_id": told["id"], "input": results}
    else:
        shown: dict[str, Callable[[Any], Any]] = {
            "whole": lambda item: item,
            "references": lambda item: {"type": "item_reference", "id": item["id"]},
            "ids": lambda item: {"id": item["id"]},
        }
        more = {"input": [asked, *map(shown[how], output), *results]}
    await post("/v1/responses", {**body, **more})


async def by_messages(post: Post) -> None:
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    body: dict[str, Any] = {
        "max_tokens": 500,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    told = await post("/v1/messages", {**body, "messages": turns})
    uses = [block["id"] for block in told["content"] if block["type"] == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": each, "content": RESULT} for each in uses
    ] or [{"type": "text", "text": RESULT}]
    turns += [{"role": "assistant", "content": told["content"]}]
    turns += [{"role": "user", "content": results}]
    await post("/v1/messages", {**body, "messages": turns})


async def by_ollama(post: Post) -> None:
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    body = {"tools": [{"type": "function", "function": FUNCTION}], "stream": False}
    told = (await post("/api/chat", {**body, "messages": turns}))["message"]
    turns.append(told)
    calls = told.get("tool_calls") or ()
    turns += [{"role": "tool", "tool_name": "weather", "content": RESULT} for _ in calls]
    if not calls:
        turns.append({"role": "user", "content": RESULT})
    await post("/api/chat", {**body, "messages": turns})


async def by_references(post: Post) -> None:
    await by_responses(post, how="references")


async def by_ids(post: Post) -> None:
    await by_responses(post, how="ids")


async def by_previous(post: Post) -> None:
    await by_responses(post, how="previous")


WAYS = (by_chat, by_responses, by_references, by_ids, by_previous, by_messages, by_ollama)
LOSSY = (by_messages, by_ollama)
"""APIs without a place for arguments that aren't JSON."""


def check(prompt: str, kind: str, *, lossy: bool) -> None:
    """Check that the second prompt has all of the answer, and the result of its call."""
    assert RESULT in prompt
    carried = prompt.partition(ASKED)[2]
    assert "none" not in carried.lower()
    calls = carried.partition("<tool>")[0].count("weather")
    assert calls == {"text": 0, "nothing": 0, "two": 2}.get(kind, 1), carried
    if kind in ("a call", "two", "reasoning", "text") or (kind == "broken" and not lossy):
        assert "Oslo" in carried


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_an_answer_of_each_api_comes_back_through_every_template(name: str) -> None:
    for kind, said in ANSWERS.items():
        template = MARKS + TEMPLATES[name]
        async with scripted(said, template=template) as (seen, _, client):
            for way in WAYS:
                seen.prompts.clear()
                await way(partial(_posted, client))
                assert len(seen.prompts) == 2, (kind, way)
                check(seen.prompts[1], kind, lossy=way in LOSSY)


async def _posted(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


KEYS = ("the-key-of-a", "the-key-of-b")


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_reference_to_what_is_not_stored_is_refused_by_its_place() -> None:
    settings = ServerSettings(api_keys={"a": KEYS[0], "b": KEYS[1]})
    async with scripted("Rain.", settings=settings) as (_, _, client):

        async def post(body: dict[str, Any], key: str = KEYS[0]) -> httpx.Response:
            body = {"model": "scripted", **body}
            return await client.post("/v1/responses", json=body, headers=keyed(key))

        told = (await post({"input": ASKED})).json()
        item = {"type": "item_reference", "id": told["output"][0]["id"]}
        user = {"role": "user", "content": ASKED}
        more = {"input": [user, item, user]}
        assert (await post(more)).status_code == 200
        unstored = (await post({"input": ASKED, "store": False})).json()["output"][0]["id"]
        for key, wrong in ((KEYS[1], item["id"]), (KEYS[0], unstored), (KEYS[0], "msg_none")):
            answer = await post({"input": [user, {"id": wrong}]}, key)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (404, "input[1]"), error
            assert (error["code"], wrong in error["message"]) == ("item_not_found", True)
        # The next response has the item as well.
        await client.delete(f"/v1/responses/{told['id']}", headers=keyed(KEYS[0]))
        assert (await post(more)).status_code == 200


async def test_references_stand_for_no_more_than_a_body_may_have() -> None:
    settings = ServerSettings(max_body_bytes=8192)
    async with scripted("Rain.", settings=settings) as (_, _, client):

        async def post(given: list[Any]) -> httpx.Response:
            return await client.post("/v1/responses", json={"model": "scripted", "input": given})

        user = {"role": "user", "content": ASKED}
        long = {"role": "assistant", "type": "message", "id": "msg_long", "content": "a" * 900}
        assert (await post([user, long, user])).status_code == 200
        item = {"type": "item_reference", "id": "msg_long"}
        assert (await post([user, item, user])).status_code == 200
        error = (await post([user, *[item] * 9, user])).json()["error"]
    assert (error["param"], error["code"]) == ("input", "limit_exceeded")
    assert "at most 8192 bytes together" in error["message"]


async def test_a_thread_is_refused_so_that_clients_go_on_without() -> None:
    body = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    async with scripted("Rain.") as (_, _, client):
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            answer = await client.post("/v1/messages", json={**body, "thread": thread})
            assert answer.status_code == 400
            assert answer.json()["error"]["details"] == {
                "error_code": "thread_unsupported_request",
                "unsupported": ["thread"],
            }
        answer = await client.post("/v1/messages", json={**body, "thread": None})
        assert answer.status_code == 200, answer.text
        wrong = await client.post("/v1/messages", json={**body, "messages": []})
        assert json.dumps(wrong.json()).count("details") == 0
