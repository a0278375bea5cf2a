"""Conversations of three turns with the anthropic client. Prints the ones that went well.

OPENAI_API_KEY=... python turns_anthropic.py URL
"""

from __future__ import annotations

import os
import sys
from typing import Any

from anthropic import Anthropic, beta_tool
from turns import NUM_TURNS, PARAMETERS, QUESTION, TELLS, result, run

ABOUT: Any = {
    "model": "scripted",
    "max_tokens": 200,
    "tools": [{"name": "add", "input_schema": PARAMETERS}],
    "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
}


def _converse(ask: Any, carried: Any = lambda content: content) -> None:
    messages: list[Any] = []
    for _ in range(NUM_TURNS):
        asked = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
        messages.append({"role": "user", "content": [asked]})
        message = ask(messages)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": carried(message.content)})
        told = {"type": "tool_result", "tool_use_id": call.id, "content": result(call.input)}
        messages.append({"role": "user", "content": [told]})
        message = ask(messages)
        assert [block.text for block in message.content if block.type == "text"] == [TELLS]
        messages.append({"role": "assistant", "content": carried(message.content)})


def whole_messages(client: Anthropic) -> None:
    _converse(lambda messages: client.messages.create(**ABOUT, messages=messages))


def dumped_messages(client: Anthropic) -> None:
    _converse(
        lambda messages: client.messages.create(**ABOUT, messages=messages),
        lambda content: [block.model_dump() for block in content],
    )


def streamed_messages(client: Anthropic) -> None:
    def ask(messages: Any) -> Any:
        with client.messages.stream(**ABOUT, messages=messages) as stream:
            return stream.get_final_message()

    _converse(ask)
    _converse(ask, lambda content: [block.model_dump() for block in content])


def run_tools(client: Anthropic) -> None:
    @beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return result({"a": a, "b": b})

    messages: list[Any] = []
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": QUESTION})
        runner = client.beta.messages.tool_runner(
            model="scripted", max_tokens=200, tools=[add], messages=messages, thread=False
        )
        for message in runner:
            messages.append({"role": "assistant", "content": message.content})
            if (told := runner.generate_tool_call_response()) is not None:
                messages.append(told)


CHECKS = (whole_messages, dumped_messages, streamed_messages, run_tools)

if __name__ == "__main__":
    run(CHECKS, Anthropic(api_key=os.environ["OPENAI_API_KEY"], base_url=sys.argv[1]))
