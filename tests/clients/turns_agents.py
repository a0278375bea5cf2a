"""Conversations of three turns with openai-agents. Prints the ones that went well.

OPENAI_API_KEY=... python turns_agents.py URL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from turns import NUM_TURNS, QUESTION, TELLS, result, run

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return result({"a": a, "b": b})


async def _converse(url: str, kind: Any, *, streams: bool) -> None:
    async with AsyncOpenAI(base_url=url, max_retries=0) as client:
        model = kind(model="scripted", openai_client=client)
        agent = Agent(name="adder", instructions="Add.", model=model, tools=[add])
        items: list[Any] = []
        for _ in range(NUM_TURNS):
            items.append({"role": "user", "content": QUESTION})
            if streams:
                done: Any = Runner.run_streamed(agent, items)
                async for _event in done.stream_events():
                    pass
            else:
                done = await Runner.run(agent, items)
            assert done.final_output == TELLS
            items = done.to_input_list()


def chat(url: str) -> None:
    asyncio.run(_converse(url, OpenAIChatCompletionsModel, streams=False))


def streamed_chat(url: str) -> None:
    asyncio.run(_converse(url, OpenAIChatCompletionsModel, streams=True))


def responses(url: str) -> None:
    asyncio.run(_converse(url, OpenAIResponsesModel, streams=False))


def streamed_responses(url: str) -> None:
    asyncio.run(_converse(url, OpenAIResponsesModel, streams=True))


CHECKS = (chat, streamed_chat, responses, streamed_responses)

if __name__ == "__main__":
    run(CHECKS, f"{sys.argv[1]}/v1")
