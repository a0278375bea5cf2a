"""Budgets of reasoning over HTTP, in the formats of vLLM and Anthropic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import served
from tests.server.talking import ASK, events_of

pytestmark = pytest.mark.asyncio

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 40},
    "/v1/completions": {"prompt": "os.path", "max_tokens": 40},
    "/v1/responses": {"input": "os.path", "max_output_tokens": 40, "store": False},
    "/v1/messages": {"messages": ASK, "max_tokens": 40},
}
THINKS = {"num_pages": 256, "reasoning_parser": "deepseek_r1"}


def body_of(path: str, most: int) -> dict[str, Any]:
    given: dict[str, Any] = {"thinking_token_budget": most, "min_tokens": 40}
    if path == "/v1/messages":
        given = {"thinking": {"type": "enabled", "budget_tokens": most}}
    return {"model": "pyhelp", "temperature": 0, **PATHS[path], **given}


@pytest.mark.parametrize("path", PATHS)
async def test_the_reasoning_ends_after_as_many_tokens(path: str) -> None:
    async with served(**THINKS) as (engine, client):
        answer = (await client.post(path, json=body_of(path, 6))).json()
        whole = (await client.post(path, json=body_of(path, 39))).json()
        tag = len(engine.tokenizer.encode("</think>", add_special_tokens=False))
    if path == "/v1/chat/completions":
        usage, message = answer["usage"], answer["choices"][0]["message"]
        assert message["content"]
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= 6 + tag
        assert whole["choices"][0]["message"]["reasoning"].startswith(message["reasoning"].rstrip())
    elif path == "/v1/completions":
        assert "</think>" in answer["choices"][0]["text"]
    elif path == "/v1/responses":
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    else:
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


async def test_a_stream_says_the_same() -> None:
    path = "/v1/messages"
    async with served(**THINKS) as (_, client):
        answer = (await client.post(path, json=body_of(path, 6))).json()
        streamed = await client.post(path, json=body_of(path, 6) | {"stream": True})
    deltas = [event["delta"] for event in events_of_messages(streamed.text)]
    said = "".join(delta.get("text", "") for delta in deltas)
    thought = "".join(delta.get("thinking", "") for delta in deltas)
    assert [thought, said] == [answer["content"][0]["thinking"], answer["content"][1]["text"]]


def events_of_messages(text: str) -> list[dict[str, Any]]:
    """Deltas of blocks."""
    data = "\n\n".join(part.partition("\n")[2] for part in text.split("\n\n") if part)
    return [one for one in events_of(data) if one["type"] == "content_block_delta"]


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages"])
async def test_a_model_that_writes_no_reasoning_says_so(path: str) -> None:
    async with served(num_pages=64) as (_, client):
        answer = await client.post(path, json=body_of(path, 6))
    assert answer.status_code == 400
    error = answer.json()["error"]
    field = "thinking_token_budget"
    assert error["message"].startswith(f"{field} isn't supported by this model")
    assert error["param"] == field


@pytest.mark.parametrize(
    ("path", "most", "why"),
    [
        ("/v1/messages", 40, "thinking.budget_tokens must be below max_tokens = 40, got 40"),
        ("/v1/messages", -1, "thinking.budget_tokens must be"),
        ("/v1/chat/completions", -1, "thinking_token_budget must be"),
        ("/v1/chat/completions", "x", "thinking_token_budget"),
    ],
)
async def test_a_budget_that_is_none_is_refused_by_name(path: str, most: Any, why: str) -> None:
    async with served(**THINKS) as (_, client):
        answer = await client.post(path, json=body_of(path, most))
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
