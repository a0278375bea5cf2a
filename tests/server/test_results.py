"""Tool calls without a result are refused in every API, with their place, unless they were cut
off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripts import scripted

pytestmark = pytest.mark.asyncio

ASK = {"role": "user", "content": "Rain?"}


def _chat(call: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call, "function": function}]}


def _result(call: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "rain", "tool_call_id": call}


def _blocks(role: str, **block: Any) -> dict[str, Any]:
    return {"role": role, "content": [block]}


USE = _blocks("assistant", type="tool_use", id="a", name="weather", input={})
TWO = {"role": "assistant", "content": [USE["content"][0], USE["content"][0] | {"id": "b"}]}
"""Two calls, of which the last may have been cut off, whatever its input."""
RESULT = _blocks("user", type="tool_result", tool_use_id="a", content="rain")
CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
GIVEN = {"type": "function_call_output", "call_id": "a", "output": "rain"}


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ([ASK, _chat("a"), _result("a")], None),
        ([ASK, _chat("a"), _result(None)], None),
        ([ASK, _chat("a"), _chat("b"), _result("b"), _result("a"), ASK], None),
        ([ASK, _chat("a")], "messages[1].tool_calls[0]"),
        ([ASK, _chat("a"), ASK], "messages[1].tool_calls[0]"),
        ([ASK, _chat("a"), _chat("b"), _result("b"), ASK], "messages[1].tool_calls[0]"),
        ([ASK, _result("a"), _chat("a"), ASK], "messages[2].tool_calls[0]"),
        ([ASK, _chat("a", '{"city": "Os'), ASK], None),
        ([ASK, _chat("a", '{"days": 1'), ASK], None),
        ([ASK, _chat("a", "{"), ASK], None),
        ([ASK, _chat("a", '{"city": "Os'), _result("a"), ASK], None),
        ([ASK, _chat("a"), _chat("b", '{"city": "Os'), ASK], "messages[1].tool_calls[0]"),
        ([ASK, _chat("a", '{"city" "Os'), ASK], "messages[1].tool_calls[0]"),
    ],
)
async def test_in_chat(turns: list[Any], named: str | None) -> None:
    await check("/v1/chat/completions", {"messages": turns}, named)


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ([ASK, USE, RESULT], None),
        ([ASK, USE, ASK], None),
        ([ASK, TWO, ASK], "messages[1].content[0]"),
        ([ASK, TWO, RESULT, ASK], None),
    ],
)
async def test_in_messages(turns: list[Any], named: str | None) -> None:
    await check("/v1/messages", {"messages": turns, "max_tokens": 20}, named)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([ASK, CALLED, GIVEN], None),
        ([ASK, CALLED, ASK, GIVEN], None),
        ([ASK, CALLED], "input[1]"),
        ([ASK, CALLED, ASK], "input[1]"),
        ([ASK, CALLED | {"status": "incomplete"}, ASK], None),
        ([ASK, CALLED | {"arguments": '{"city": "Os'}, ASK], None),
    ],
)
async def test_in_responses(items: list[Any], named: str | None) -> None:
    await check("/v1/responses", {"input": items}, named)


async def check(path: str, body: dict[str, Any], named: str | None) -> None:
    async with scripted() as (_, _, client):
        answer = await client.post(path, json={"model": "scripted", **body})
    if named is None:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == f"{named}: the call 'a' must have a result behind it, and has none"
