"""Common parts of the scripts that hold conversations: a question, a tool, and the running of
checks.

Each script runs with one client's packages, and can't import other test modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

QUESTION = "What is 1 and 2?"
TELLS = "It is 3."
NUM_TURNS = 3
PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS},
}


def result(arguments: str | dict[str, Any]) -> str:
    """Result of the tool for the arguments of a call."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


def in_chat(ask: Callable[[list[Any]], Any], carried: Callable[[Any], Any] = lambda x: x) -> None:
    """Hold a conversation in the OpenAI API. `ask` returns the next message, and `carried` makes of
    it the one that is sent back."""
    messages: list[Any] = []
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": QUESTION})
        message = ask(messages)
        (call,) = message.tool_calls
        messages.append(carried(message))
        told = {"role": "tool", "tool_call_id": call.id, "content": result(call.function.arguments)}
        messages.append(told)
        message = ask(messages)
        assert message.content == TELLS, message
        assert message.reasoning_content == "There it is."
        messages.append(carried(message))


def run(checks: Sequence[Callable[[Any], None]], given: Any) -> None:
    for check in checks:
        check(given)
        print(check.__name__, flush=True)
