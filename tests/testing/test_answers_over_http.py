"""A fake model with answers behind the server's APIs: text, calls, forms and vectors arrive as each
API has them, whole and in streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from aioserve import Engine
from aioserve.server import create_app
from aioserve.testing import FakeModel
from tests.engine.idle import all_given_back

pytestmark = pytest.mark.asyncio

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Oslo?"}]
TEXT = "Rain \u2614\ufe0f, <|im_end|> and \u00e6\u00f8\u00e5."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = ("weather", "clock")
FUNCTIONS = [
    {"name": "weather", "parameters": PARAMETERS},
    {"name": "clock"},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
OF_ANTHROPIC = [
    {"name": "weather", "input_schema": PARAMETERS},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
CALL = {"name": "weather", "arguments": {"city": "Troms\u00f8"}}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Say", "max_tokens": 100},
    CHAT: {"messages": ASK},
    RESPONSES: {"input": ASK},
    MESSAGES: {"messages": ASK, "max_tokens": 500},
    OLLAMA: {"messages": ASK, "stream": False},
}


@asynccontextmanager
async def serving(model: FakeModel, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with Engine(model, **options) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
        assert await all_given_back(engine)


async def sent(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The answer to a body, JSON or lines of it."""
    body = {"model": "fake", **BODIES.get(path, {}), **body}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def text_of(path: str, answer: Any) -> str:
    """Text of a whole answer, or of the events of one."""
    if path == COMPLETIONS:
        chunks = answer if isinstance(answer, list) else [answer]
        return "".join([chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]])
    if path == CHAT:
        if isinstance(answer, dict):
            return answer["choices"][0]["message"]["content"]
        deltas = [chunk["choices"][0]["delta"] for chunk in answer if chunk["choices"]]
        return "".join([delta.get("content") or "" for delta in deltas])
    if path == RESPONSES:
        if isinstance(answer, dict):
            return answer["output"][0]["content"][0]["text"]
        kind = "response.output_text.delta"
        return "".join([event["delta"] for event in answer if event["type"] == kind])
    if path == MESSAGES:
        if isinstance(answer, dict):
            return answer["content"][0]["text"]
        deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
        return "".join([delta["text"] for delta in deltas])
    lines = answer if isinstance(answer, list) else [answer]
    return "".join([line["message"]["content"] for line in lines])


def calls_of(path: str, answer: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an answer, whole or in events."""
    if path == CHAT and isinstance(answer, list):
        calls: dict[int, list[str]] = {}
        for chunk in answer:
            for call in chunk["choices"][0]["delta"].get("tool_calls") or ():
                name = call["function"].get("name")
                own = calls.setdefault(call["index"], [name, ""])
                own[1] += call["function"].get("arguments") or ""
        return [(name, json.loads(arguments)) for name, arguments in calls.values()]
    if path == CHAT:
        own = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        return [(call["name"], json.loads(call["arguments"])) for call in own]
    if path == RESPONSES:
        if isinstance(answer, list):
            answer = answer[-1]["response"]
        own = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in own]
    if path == MESSAGES:
        if isinstance(answer, dict):
            own = [block for block in answer["content"] if block["type"] == "tool_use"]
            return [(block["name"], block["input"]) for block in own]
        blocks = [e["content_block"] for e in answer if e["type"] == "content_block_start"]
        deltas = [e["delta"] for e in answer if e["type"] == "content_block_delta"]
        joined = "".join([delta["partial_json"] for delta in deltas])
        return [(blocks[0]["name"], json.loads(joined))]
    lines = answer if isinstance(answer, list) else [answer]
    own = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in own]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_text_arrives_whole_in_every_api(path: str, stream: bool) -> None:
    model = FakeModel(answers=[TEXT, ""])
    async with serving(model) as client:
        assert text_of(path, await sent(client, path, stream=stream)) == TEXT
        if not stream:
            again = await client.post(path, json={"model": "fake", **BODIES[path]})
            assert again.status_code == 200
            lost = await client.post(path, json={"model": "fake", **BODIES[path]})
            assert lost.status_code == 500
            assert "answers has 2, and this is request 3" in lost.text
    heard = model.requests[0]
    assert (heard.prompt, heard.messages) == ("Say", None) if path == COMPLETIONS else (None, ASK)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"tools": TOOLS}),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (RESPONSES, {"tools": FLAT}),
        (RESPONSES, {"tools": FLAT, "tool_choice": "required"}),
        (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}}),
        (MESSAGES, {"tools": OF_ANTHROPIC}),
        (MESSAGES, {"tools": OF_ANTHROPIC, "tool_choice": {"type": "any"}}),
        (MESSAGES, {"tools": OF_ANTHROPIC, "tool_choice": {"type": "tool", "name": "weather"}}),
        (OLLAMA, {"tools": TOOLS}),
    ],
)
async def test_a_call_arrives_in_every_api_whatever_the_choice(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    model = FakeModel(answers=CALL)
    async with serving(model) as client:
        answer = await sent(client, path, stream=stream, **body)
    assert calls_of(path, answer) == [("weather", CALL["arguments"])]
    assert [tool["function"]["name"] for tool in model.requests[0].tools] == [*NAMES]


async def test_a_conversation_goes_on_behind_a_call() -> None:
    def answer(messages: list[dict[str, Any]]) -> Any:
        return CALL if messages[-1]["role"] == "user" else f"It's {messages[-1]['content']}."

    model = FakeModel(answers=answer)
    async with serving(model) as client:
        first = await sent(client, CHAT, tools=TOOLS)
        message = first["choices"][0]["message"]
        heard = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"}
        second = await sent(client, CHAT, tools=TOOLS, messages=[*ASK, message, heard])
        assert text_of(CHAT, second) == "It's wet."
    roles = [message["role"] for message in model.requests[1].messages or ()]
    assert roles == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("answer", "choice", "why"),
    [
        ("Rain.", "required", "doesn't fit the form .* at character 0 comes 'R'"),
        (
            {"name": "clock", "arguments": {}},
            "weather",
            "calls 'clock', and the request asks for a call of weather",
        ),
        ({"name": "weather", "arguments": {}}, "weather", "comes '}'"),
        (CALL, "clock", "calls 'weather', and the request asks for a call of clock"),
        (CALL, "none", "calls 'weather', and the tools of the request are: none"),
    ],
)
async def test_a_call_that_was_not_asked_for_is_told_by_name(
    answer: Any, choice: str, why: str
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    body = {"model": "fake", "messages": ASK, "tools": TOOLS}
    body["tool_choice"] = named if choice in NAMES else choice
    async with serving(FakeModel(answers=answer)) as client:
        found = await client.post(CHAT, json=body)
        assert found.status_code == 500
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(found.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
async def test_json_of_a_schema_arrives_or_its_error_says_where_it_goes_wrong(stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
    model = FakeModel(answers=['{"city": "Oslo"}', '{"city": 3}'])
    async with serving(model) as client:
        found = await sent(client, CHAT, response_format=wanted, stream=stream)
        assert json.loads(text_of(CHAT, found)) == {"city": "Oslo"}
        body = {"model": "fake", "messages": ASK, "response_format": wanted, "stream": stream}
        failed = await client.post(CHAT, json=body)
    lines = [line.removeprefix("data: ") for line in failed.text.splitlines() if '"error"' in line]
    error = json.loads(lines[-1])["error"]
    assert "at character 9, behind '{\"city\": ', comes '3', and the form all" in error["message"]


async def test_choices_usage_and_log_probabilities_are_those_of_the_engine() -> None:
    async with serving(FakeModel(answers="Hi!")) as client:
        answer = await sent(client, CHAT, n=3, logprobs=True, top_logprobs=1, max_tokens=2)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hi"] * 3
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6
    told = answer["choices"][2]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in told] == [("H", 0.0), ("i", 0.0)]


async def test_vectors_and_ranks_come_of_texts() -> None:
    async with serving(FakeModel(answers="")) as client:
        body = {"input": ["Rain in Oslo", "Snow", "Rain in Oslo"]}
        found = (await sent(client, "/v1/embeddings", **body))["data"]
        first, second, third = [one["embedding"] for one in found]
        assert first == third != second
        assert np.linalg.norm(first) == pytest.approx(1, abs=1e-6)
        ranked = await sent(client, "/rerank", query="oslo rain", documents=body["input"][:2])
        assert [one["index"] for one in ranked["results"]] == [0, 1]
        scored = await sent(client, "/score", text_1="Snow", text_2=["Snow", "Rain"])
        assert scored["data"][0]["score"] == pytest.approx(1, abs=1e-6)
