"""Common parts of the tests of the OpenAI API: scripted models, events, answers joined from
chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import aioserve.assets
from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from tests.engine.scripted import ScriptedModel
from tests.server.serving import client_of

__all__ = [
    "ASK",
    "CHAT_BODY",
    "HERMES",
    "TOOLS",
    "chat_joined",
    "chat_whole",
    "completions_joined",
    "events_of",
    "post",
    "pyhelp_with",
    "scripted",
]

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "CALL{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    + TURNS
    + "{# </think> #}"
)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Oslo?"}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 5}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {"to": {"$ref": "#/$defs/place"}},
                "required": ["to"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": ["north", "south"]}},
            },
        },
    },
]
CHAT_BODY: dict[str, Any] = {"model": "scripted", "messages": ASK, "seed": 0}


@asynccontextmanager
async def scripted(
    *answers: str, template: str = HERMES, settings: ServerSettings | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Serve a model that gives the answer of the request's seed."""
    model = ScriptedModel(template, *answers)
    async with Engine(model, **options) as engine, client_of(create_app(engine, settings)) as one:
        yield engine, one


def pyhelp_with(template: str, path: Path) -> str:
    """Path of the embedded model with another chat template."""
    source = Path(aioserve.assets.__file__).parent / "pyhelp"
    made = path / "pyhelp"
    shutil.copytree(source, made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return str(made)


def events_of(text: str) -> list[Any]:
    """Data of each event; `[DONE]` stays text."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """Post a request that must succeed. Return its answer, or the events of a stream before its one
    end."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return events[:-1]


def completions_joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices joined from chunks, in the form of a whole answer."""
    joined: dict[int, dict[str, Any]] = {}
    for piece in [choice for event in events for choice in event["choices"]]:
        choice = joined.setdefault(
            piece["index"],
            {"index": piece["index"], "text": "", "logprobs": None, "finish_reason": None},
        )
        assert choice["finish_reason"] is None, "a piece behind the last one"
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        if piece["finish_reason"] is not None:
            choice["stop_reason"] = piece.get("stop_reason")
        for name in ("token_ids", "prompt_token_ids"):
            if name in piece:
                choice[name] = choice.get(name, []) + piece[name]
        if (logprobs := piece.get("logprobs")) is not None:
            if choice["logprobs"] is None:
                choice["logprobs"] = {name: [] for name in logprobs}
            for name, entries in logprobs.items():
                choice["logprobs"][name] += entries
    return joined


def chat_joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices of chat joined from chunks. Calls lose their ids, which differ each time."""
    joined: dict[int, dict[str, Any]] = {}
    for piece in [choice for event in events for choice in event["choices"]]:
        delta = piece["delta"]
        if piece["index"] not in joined:
            assert delta.get("role") == "assistant"
            joined[piece["index"]] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
        else:
            assert "role" not in delta
        choice = joined[piece["index"]]
        assert "finish_reason" not in choice, "a piece behind the last one"
        choice["content"] += delta.get("content") or ""
        choice["reasoning"] += delta.get("reasoning_content", "")
        choice["logprobs"] += (piece.get("logprobs") or {}).get("content", [])
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(choice["calls"]):
                assert call["id"]
                assert call["type"] == "function"
                choice["calls"].append([call["function"]["name"], ""])
            else:
                assert "id" not in call
                assert "name" not in call["function"]
            choice["calls"][call["index"]][1] += call["function"].get("arguments", "")
        if piece["finish_reason"] is not None:
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
    return joined


def chat_whole(answer: Any) -> dict[int, dict[str, Any]]:
    """Choices of a whole answer of chat, in the same form."""
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning_content", ""),
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls", ())
            ],
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }
