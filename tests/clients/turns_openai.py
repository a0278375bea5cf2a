"""Conversations of three turns with the openai client. Prints the ones that went well.

OPENAI_API_KEY=... python turns_openai.py URL
"""

from __future__ import annotations

import sys
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel
from turns import ADD, NUM_TURNS, PARAMETERS, QUESTION, TELLS, in_chat, result, run

ABOUT: Any = {"model": "scripted"}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}


class Add(BaseModel):
    a: int
    b: int


def whole_messages(client: OpenAI) -> None:
    in_chat(
        lambda messages: (
            client.chat.completions.create(**ABOUT, messages=messages, tools=[ADD])
            .choices[0]
            .message
        )
    )


def dumped_messages(client: OpenAI) -> None:
    in_chat(
        lambda messages: (
            client.chat.completions.create(**ABOUT, messages=messages, tools=[ADD])
            .choices[0]
            .message
        ),
        lambda message: message.model_dump(),
    )


def parsed_messages(client: OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Add, name="add")]

    def ask(messages: Any) -> Any:
        done = client.chat.completions.parse(**ABOUT, messages=messages, tools=tools)
        return done.choices[0].message

    in_chat(ask)
    in_chat(ask, lambda message: message.model_dump())


def streamed_messages(client: OpenAI) -> None:
    def ask(messages: Any) -> Any:
        with client.chat.completions.stream(**ABOUT, messages=messages, tools=[ADD]) as stream:
            return stream.get_final_completion().choices[0].message

    in_chat(ask)
    in_chat(ask, lambda message: message.model_dump())


def _items(ask: Any, *, stored: bool = False, dumped: bool = False) -> None:
    items: list[Any] = []
    before = None

    def next_one(new: list[Any]) -> Any:
        nonlocal before
        items.extend(new)
        response = ask(new if stored else items, before)
        before = response.id if stored else None
        items.extend([item.model_dump() for item in response.output] if dumped else response.output)
        return response

    for _ in range(NUM_TURNS):
        response = next_one([{"role": "user", "content": QUESTION}])
        (call,) = [item for item in response.output if item.type == "function_call"]
        told = {"type": "function_call_output", "call_id": call.call_id}
        response = next_one([{**told, "output": result(call.arguments)}])
        assert response.output_text == TELLS


def items_of_responses(client: OpenAI) -> None:
    for dumped in (False, True):
        _items(
            lambda items, _: client.responses.create(
                **ABOUT, input=items, tools=[FUNCTION], store=False
            ),
            dumped=dumped,
        )


def stored_responses(client: OpenAI) -> None:
    _items(
        lambda items, before: client.responses.create(
            **ABOUT, input=items, tools=[FUNCTION], previous_response_id=before
        ),
        stored=True,
    )


def parsed_responses(client: OpenAI) -> None:
    flat: Any = openai.pydantic_function_tool(Add, name="add")["function"]
    tools: Any = [{"type": "function", **flat}]
    for dumped in (False, True):
        _items(
            lambda items, _: client.responses.parse(**ABOUT, input=items, tools=tools),
            dumped=dumped,
        )


def streamed_responses(client: OpenAI) -> None:
    def ask(items: Any, _: Any) -> Any:
        with client.responses.stream(**ABOUT, input=items, tools=[FUNCTION]) as stream:
            return stream.get_final_response()

    _items(ask)


CHECKS = (
    whole_messages,
    dumped_messages,
    parsed_messages,
    streamed_messages,
    items_of_responses,
    stored_responses,
    parsed_responses,
    streamed_responses,
)

if __name__ == "__main__":
    run(CHECKS, OpenAI(base_url=f"{sys.argv[1]}/v1", max_retries=0))
