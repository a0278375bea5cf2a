"""Common uses of the ollama client, tried on a server. Prints the ones that worked.

    OPENAI_API_KEY=... python talk_ollama.py PYHELP_URL SCRIPTED_URL

The first URL serves "pyhelp", and the second "scripted". There, the seed chooses the answer: 0 is
content, 1 is a call of the tool `add`, and 2 is reasoning and content.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import ollama
from ollama import AsyncClient, Client
from pydantic import BaseModel, Field

USER: Any = [{"role": "user", "content": "What does json.dumps do?"}]
BRIEF: Any = {"num_predict": 8, "temperature": 0}


class Colour(BaseModel):
    name: str = Field(max_length=20)  # without it, the model would never end
    is_warm: bool


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def lists_and_shows_models(pyhelp: Client, scripted: Client) -> None:
    (model,) = pyhelp.list().models
    assert model.model == "pyhelp"
    (running,) = pyhelp.ps().models
    assert running.context_length
    shown = pyhelp.show("pyhelp")
    assert shown.details is not None
    assert shown.details.family
    assert shown.capabilities is not None
    assert "tools" in shown.capabilities
    try:
        pyhelp.show("other")
    except ollama.ResponseError as told:
        assert told.status_code == 404
        assert "other" in told.error
    else:
        raise AssertionError("a model that isn't there was found")


def chats(pyhelp: Client, scripted: Client) -> None:
    whole = pyhelp.chat("pyhelp", USER, options=BRIEF, keep_alive="5m")
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 8)
    assert whole.total_duration
    pieces = list(pyhelp.chat("pyhelp", USER, options=BRIEF, stream=True))
    assert "".join([piece.message.content or "" for piece in pieces]) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def generates(pyhelp: Client, scripted: Client) -> None:
    whole = pyhelp.generate("pyhelp", "json.dumps", raw=True, options=BRIEF)
    pieces = pyhelp.generate("pyhelp", "json.dumps", raw=True, options=BRIEF, stream=True)
    assert "".join([piece.response or "" for piece in pieces]) == whole.response
    loaded = pyhelp.generate("pyhelp")
    assert loaded.done_reason == "load"


def calls_a_tool(pyhelp: Client, scripted: Client) -> None:
    for stream in (False, True):
        asked: Any = {"tools": [add], "options": {"seed": 1}, "stream": stream}
        answer: Any = scripted.chat("scripted", USER, **asked)
        pieces = list(answer) if stream else [answer]
        (call,) = [call for piece in pieces for call in piece.message.tool_calls or ()]
        assert add(**call.function.arguments) == 3
    message = ollama.Message(role="assistant", tool_calls=[call])
    result = {"role": "tool", "content": "3", "tool_name": "add"}
    told = scripted.chat("scripted", [*USER, message, result], tools=[add], options={"seed": 0})
    assert told.message.content == "It is 3."


def tells_reasoning(pyhelp: Client, scripted: Client) -> None:
    told = scripted.chat("scripted", USER, options={"seed": 2}, think=True)
    assert (told.message.thinking, told.message.content) == ("Two and two.", "It is 4.")


def takes_a_schema(pyhelp: Client, scripted: Client) -> None:
    schema = Colour.model_json_schema()
    answer = pyhelp.chat("pyhelp", USER, format=schema, options={"num_predict": 80})
    assert Colour.model_validate_json(answer.message.content or "").name is not None


def streams_without_threads(pyhelp: Client, scripted: Client) -> None:
    async def said() -> str:
        client = client_at(AsyncClient, sys.argv[1])
        stream = await client.chat("pyhelp", USER, options=BRIEF, stream=True)
        return "".join([piece.message.content or "" async for piece in stream])

    assert asyncio.run(said()) == pyhelp.chat("pyhelp", USER, options=BRIEF).message.content


def client_at(kind: Any, url: str) -> Any:
    return kind(url, headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"})


def main() -> None:
    pyhelp, scripted = (client_at(Client, url) for url in sys.argv[1:3])
    for check in (
        lists_and_shows_models,
        chats,
        generates,
        calls_a_tool,
        tells_reasoning,
        takes_a_schema,
        streams_without_threads,
    ):
        check(pyhelp, scripted)
        print(check.__name__)


if __name__ == "__main__":
    main()
