"""`/v1/responses` and `/v1/messages` as the official clients for Python read them.

Answers and events have all fields of the clients' types. These tests are run by `test_clients.py`.
"""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.server.scripts import CALLS, PLAIN, scripted

pytestmark = pytest.mark.asyncio


def checked(value: Any) -> Any:
    """Return `value` if it has all fields of the client's type, which clients themselves don't
    check."""
    return type(value).model_validate(value.to_dict())


async def test_the_openai_client_reads_responses_and_their_streams() -> None:
    tools = [{"type": "function", "name": "weather", "parameters": {}, "strict": False}]
    about: dict[str, Any] = {"model": "scripted", "tools": tools, "extra_body": {"seed": 0}}
    async with (
        scripted(CALLS, PLAIN) as (_, _, http),
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x") as client,
    ):
        asked = checked(await client.responses.create(input="a", **about))
        kinds = [item.type for item in asked.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert checked(await client.responses.retrieve(asked.id)) == asked
        listed = await client.responses.input_items.list(asked.id)
        assert [checked(item).role for item in listed.data] == ["user"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in asked.output[2:]
        ]
        about["extra_body"] = {"seed": 1}
        told = await client.responses.create(input=results, previous_response_id=asked.id, **about)
        again = await client.responses.create(
            input=[{"role": "user", "content": "a"}, *asked.output, *results], **about
        )
        assert told.output_text == again.output_text == PLAIN
        assert told.usage.input_tokens == again.usage.input_tokens
        about["extra_body"] = {"seed": 0}
        async for event in await client.responses.create(input="a", stream=True, **about):
            checked(event)
        async with client.responses.stream(input="a", **about) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == kinds
        assert final.output_text == asked.output_text
        await client.responses.delete(asked.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(asked.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.create(input="a", background=True, **about)


async def test_the_anthropic_client_reads_messages_and_their_streams() -> None:
    ask = {"role": "user", "content": "a"}
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    about: dict[str, Any] = {"model": "scripted", "tools": tools, "max_tokens": 1000}
    async with (
        scripted(CALLS) as (_, _, http),
        anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="x") as client,
    ):
        asked = checked(await client.messages.create(messages=[ask], **about))
        kinds = [block.type for block in asked.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in asked.content[2:]
        ]
        going_on = [
            ask,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": results},
        ]
        checked(await client.messages.create(messages=going_on, **about))
        stream = await client.messages.create(messages=[ask], stream=True, **about)
        async for event in stream:
            checked(event)
        async with client.messages.stream(messages=[ask], **about) as stream:
            final = await stream.get_final_message()
        assert final.stop_reason == asked.stop_reason == "tool_use"
        assert final.content[2].input == asked.content[2].input
        count = await client.messages.count_tokens(model="scripted", messages=[ask], tools=tools)
        usage = final.usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(messages=[ask], **about | {"model": "x"})
