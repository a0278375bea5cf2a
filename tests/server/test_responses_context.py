"""Context of `/v1/responses`: truncation, and the effort of reasoning."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aioserve.server.openai.responses_api.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Placed,
    ReasoningItem,
    shortened,
)
from tests.server.scripts import TEMPLATE, scripted

BODY: dict[str, Any] = {"model": "scripted", "input": "How is it outside?", "seed": 0}
LONG = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "oldest " * 40},
    {"role": "assistant", "content": "answer " * 40},
    {"role": "user", "content": "newer " * 20},
    {"role": "assistant", "content": "again " * 4},
    {"role": "user", "content": "newest"},
]
EFFORT = TEMPLATE + "{% if reasoning_effort %}EFFORT {{ reasoning_effort }}.{% endif %}"
SWITCH = TEMPLATE + "{% if enable_thinking is defined %}THINKS {{ enable_thinking }}.{% endif %}"


@pytest.mark.asyncio
async def test_a_conversation_that_is_too_long_loses_its_oldest_items() -> None:
    async with scripted(max_model_len=400) as (seen, _, client):
        body = BODY | {"input": LONG, "max_output_tokens": 40, "instructions": "Hear."}
        refused = await client.post("/v1/responses", json=body)
        body |= {"truncation": "auto"}
        answer = (await client.post("/v1/responses", json=body)).json()
        listed = await client.get(f"/v1/responses/{answer['id']}/input_items")
        prompt = seen.prompts[-1]
        body = BODY | {"previous_response_id": answer["id"], "truncation": "auto"}
        following = await client.post("/v1/responses", json=body)
        one = BODY | {"input": "x" * 500, "truncation": "auto"}
        never = await client.post("/v1/responses", json=one)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert (answer["status"], answer["truncation"]) == ("completed", "auto")
    assert prompt.startswith("<|im_start|>system\nHear.\n\nBe kind.<|im_end|>\n<|im_start|>user")
    assert "oldest" not in prompt
    assert "answer" not in prompt
    assert "newer" in prompt
    assert len(listed.json()["data"]) == len(LONG)
    assert following.status_code == 200
    assert never.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.asyncio
async def test_a_conversation_that_fits_stays_whole() -> None:
    async with scripted() as (seen, _, client):
        for truncation in ("auto", "disabled", None):
            body = BODY | {"input": LONG, "truncation": truncation}
            answer = (await client.post("/v1/responses", json=body)).json()
            assert answer["truncation"] == (truncation or "disabled")
    assert len(set(seen.prompts)) == 1


def _item(kind: str) -> Item:
    if kind == "reasoning":
        return ReasoningItem()
    if kind.startswith("call"):
        return FunctionCall(call_id=kind.removeprefix("call"), name="f", arguments="{}")
    if kind.startswith("result"):
        return FunctionCallOutput(call_id=kind.removeprefix("result"), output="")
    return Message(role=kind, content="")  # pyright: ignore[reportArgumentType]


@st.composite
def conversations(draw: st.DrawFn) -> list[Placed]:
    """Conversations like those of clients, with each result after its call."""
    kinds = draw(st.lists(st.sampled_from(["system", "developer"]), max_size=2))
    open_calls: list[str] = []
    for number in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["user", "assistant", "reasoning", "call", "result"]))
        if kind == "call":
            open_calls.append(str(number))
            kind = f"call{number}"
        elif kind == "result":
            if not open_calls:
                continue
            kind = f"result{open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))}"
        kinds.append(kind)
    kinds += [f"result{call}" for call in open_calls]
    return [(str(place), _item(kind)) for place, kind in enumerate(kinds or ["user"])]


@pytest.mark.asyncio
@given(conversations(), st.integers(0, 16))
async def test_what_stays_is_the_newest_with_all_that_must_stay(
    items: list[Placed], most: int
) -> None:
    asked: list[int] = []

    async def fits(some: Any) -> bool:
        asked.append(len(some))
        return len(some) <= most

    async def never(_: Any) -> bool:
        return False

    kept = await shortened(items, fits)
    assert len(kept) <= most or kept == await shortened(items, never)
    head = [one for one in items if _role(one) in ("system", "developer")]
    users = [one for one in items if _role(one) == "user"]
    for at in range(len(head), len(items)):
        rest = _with_their_calls(items[at:])
        is_behind = not any(_role(one) == "user" for one in rest)
        could_stay = [*head, *(users[-1:] if is_behind else ()), *rest]
        if len(could_stay) <= most and (is_behind or _role(items[at]) == "user"):
            assert len(kept) >= len(could_stay)
    places = [int(place) for place, _ in kept]
    assert places == sorted(set(places))
    if len(items) <= most:
        assert kept == items
    assert all(one in kept for one in [*head, *users[-1:]])
    last = next(one for one in reversed(items) if not isinstance(one[1], FunctionCallOutput))
    assert last in kept
    calls = {item.call_id for _, item in kept if isinstance(item, FunctionCall)}
    results = {item.call_id for _, item in kept if isinstance(item, FunctionCallOutput)}
    assert calls == results
    assert len(asked) <= 5


def _with_their_calls(items: list[Placed]) -> list[Placed]:
    calls = {item.call_id for _, item in items if isinstance(item, FunctionCall)}
    return [
        (place, item)
        for place, item in items
        if not isinstance(item, FunctionCallOutput) or item.call_id in calls
    ]


def _role(placed: Placed) -> str | None:
    return placed[1].role if isinstance(placed[1], Message) else None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        (EFFORT, "low", "EFFORT low."),
        (EFFORT, "none", "EFFORT none."),
        (SWITCH, "none", "THINKS False."),
        (SWITCH, "high", "THINKS True."),
    ],
)
async def test_an_effort_is_what_the_template_reads_of_it(
    template: str, effort: str, shown: str
) -> None:
    async with scripted(template=template) as (seen, _, client):
        body = BODY | {"reasoning": {"effort": effort, "summary": "auto"}}
        answer = (await client.post("/v1/responses", json=body)).json()
        ask = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
        chat = await client.post("/v1/chat/completions", json=ask | {"reasoning_effort": effort})
        other = {"reasoning_effort": "other", "enable_thinking": effort == "none"}
        key = "reasoning_effort" if template == EFFORT else "enable_thinking"
        both = ask | {"reasoning_effort": effort, "chat_template_kwargs": {key: other[key]}}
        refused = await client.post("/v1/chat/completions", json=both)
        said = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        given = BODY | {"chat_template_kwargs": {key: said[key]}}
        assert (await client.post("/v1/responses", json=given)).status_code == 200
        mixed = await client.post("/v1/responses", json=body | {"chat_template_kwargs": other})
        unread = await client.post("/v1/responses", json=BODY | {"chat_template_kwargs": {"x": 1}})
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "reasoning.effort")
    assert (unread.status_code, unread.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert answer["reasoning"] == {"effort": effort, "summary": "auto"}
    assert chat.status_code == 200
    assert [prompt.endswith(shown) for prompt in seen.prompts] == [True] * 3
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
RIGHT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = RIGHT.replace("Oslo", "Rome")


@pytest.mark.asyncio
async def test_tools_that_do_not_say_are_strict_where_they_can_be() -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    other = {"type": "function", "name": "other", "parameters": {"$dynamicRef": "#"}}
    async with scripted(RIGHT, WRONG) as (_, _, client):

        async def asked(seed: int, *tools: dict[str, Any]) -> Any:
            body = BODY | {"seed": seed, "tools": tools}
            return await client.post("/v1/responses", json=body)

        for strict in ({}, {"strict": None}, {"strict": True}):
            answer = (await asked(0, tool | strict)).json()
            assert json.loads(answer["output"][0]["arguments"]) == {"city": "Oslo"}
            assert answer["tools"][0]["strict"] is True
            assert (await asked(1, tool | strict)).status_code == 500
        for tools in ([tool | {"strict": False}], [tool, other]):
            answer = (await asked(1, *tools)).json()
            assert json.loads(answer["output"][0]["arguments"]) == {"city": "Rome"}
            assert [one["strict"] for one in answer["tools"]] == [False] * len(tools)
        stated = (await asked(0, tool | {"strict": True}, other)).json()
        assert [one["strict"] for one in stated["tools"]] == [True, False]
        refused = await asked(0, tool, other | {"strict": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.asyncio
async def test_no_response_can_be_cancelled_as_none_is_in_the_background() -> None:
    async with scripted("Rain.") as (_, _, client):
        made = (await client.post("/v1/responses", json=BODY)).json()
        path = f"/v1/responses/{made['id']}/cancel"
        answer = await client.post(path)
        unknown = await client.post("/v1/responses/resp_none/cancel")
        with_body = await client.post(path, json={"a": 1})
        query = await client.post(f"{path}?a=1")
        there = await client.get(f"/v1/responses/{made['id']}")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == "Cannot cancel a synchronous response."
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "response_not_found")
    assert (with_body.status_code, query.status_code) == (400, 400)
    assert query.json()["error"]["param"] == "a"
    assert there.json() == made
