"""Conversations of three turns with LangChain. Prints the ones that went well.

OPENAI_API_KEY=... python turns_langchain.py URL
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from turns import ADD, NUM_TURNS, QUESTION, TELLS, result, run


def _converse(ask: Any) -> None:
    messages: list[Any] = []
    for _ in range(NUM_TURNS):
        messages.append(HumanMessage(QUESTION, name="ann"))
        message: AIMessage = ask(messages)
        (call,) = message.tool_calls
        messages.append(message)
        messages.append(ToolMessage(result(call["args"]), tool_call_id=call["id"], name="add"))
        message = ask(messages)
        message.name = "bob"
        assert message.text == TELLS, message
        messages.append(message)


def _streamed(model: Any) -> Any:
    def ask(messages: list[Any]) -> Any:
        chunks = list(model.stream(messages))
        return sum(chunks[1:], chunks[0])

    return ask


def invoked(url: str) -> None:
    model = ChatOpenAI(model="scripted", base_url=url, max_retries=0).bind_tools([ADD])
    _converse(model.invoke)


def streamed(url: str) -> None:
    model = ChatOpenAI(model="scripted", base_url=url, max_retries=0).bind_tools([ADD])
    _converse(_streamed(model))


def responses(url: str) -> None:
    about: Any = {"model": "scripted", "base_url": url, "max_retries": 0, "use_responses_api": True}
    model = ChatOpenAI(**about, store=False).bind_tools([ADD])
    _converse(model.invoke)
    _converse(_streamed(model))


CHECKS = (invoked, streamed, responses)

if __name__ == "__main__":
    run(CHECKS, f"{sys.argv[1]}/v1")
