"""Messages for templates in harmony, which read less than a conversation may have.

    assistant: Let me see, call 1, call 2      assistant: call 1 (reasoning: Let me see)
    tool: result 1                         ─►  tool: result 1
    tool: result 2                             assistant: call 2
                                               tool: result 2

A harmony template leaves out further calls of a message, and takes each result for one of the call
before it. It refuses a message with calls that has both reasoning and content: text before a call
is reasoning there. It reads only the first message of instructions. So this module rearranges them:
nothing is lost, and clients needn't know. Instructions after other messages are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioserve.errors import InvalidPromptError

__all__ = ["with_joined_instructions", "with_single_calls"]

Message = dict[str, Any]


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call in each, and its results after it.

    Results of unknown calls stay behind those of the last call.
    """
    arranged: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if message["role"] != "assistant" or not message.get("tool_calls"):
            arranged.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        arranged += _arranged(message, results)
    return arranged


def with_joined_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the leading system and developer messages joined into one.

    Raises `InvalidPromptError` for such a message after others: the template would leave it out.
    """
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    for index, message in enumerate(messages[count:], count):
        if message["role"] in ("system", "developer"):
            raise InvalidPromptError(
                f"messages[{index}] is of the role {message['role']!r}, and the chat template "
                "reads instructions at the beginning of a conversation alone",
                argument="messages",
            )
    if count < 2:
        return list(messages)
    texts = [message["content"] for message in messages[:count] if message["content"]]
    return [{"role": "developer", "content": "\n\n".join(texts)}, *messages[count:]]


def _arranged(message: Message, results: list[Message]) -> list[Message]:
    calls = message["tool_calls"]
    by_id = {call["id"]: number for number, call in enumerate(calls) if call.get("id")}
    of_calls: list[list[Message]] = [[] for _ in calls]
    for place, result in enumerate(results):
        in_order = min(place, len(calls) - 1)
        number = by_id.get(result.get("tool_call_id") or "", None if by_id else in_order)
        of_calls[len(calls) - 1 if number is None else number].append(result)
    fields = ("content", "reasoning_content", "tool_calls")
    bare = {name: value for name, value in message.items() if name not in fields}
    said = [message[name] for name in ("reasoning_content", "content") if message.get(name)]
    arranged: list[Message] = []
    for number, (call, its) in enumerate(zip(calls, of_calls, strict=True)):
        single = {**bare, "content": "", "tool_calls": [call]}
        if said and not number:
            single["reasoning_content"] = "\n".join(said)
        arranged += [single, *its]
    return arranged
