"""`/v1/completions`, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from aioserve import SamplingParams
from tests.server.serving import served
from tests.server.talking import events_of, post
from tests.waits import until

PROMPT = "json.dumps"
BODY: dict[str, Any] = {"model": "pyhelp", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}


@pytest.mark.asyncio
async def test_an_answer_is_that_of_the_engine() -> None:
    async with served(num_pages=256) as (engine, client):
        answer = (await client.post("/v1/completions", json=BODY)).json()
        whole = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert answer["choices"] == [
        {
            "index": 0,
            "text": whole.text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.asyncio
async def test_a_streamed_answer_says_the_same_and_ends_once() -> None:
    async with served(num_pages=256) as (_, client):
        whole = (await client.post("/v1/completions", json=BODY)).json()
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of((await client.post("/v1/completions", json=body)).text)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
    assert text == whole["choices"][0]["text"]
    assert events[-2]["usage"]["completion_tokens"] == 8


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with served(num_pages=256) as (engine, client):
        body = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": stream}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: not engine.stats().num_running)
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert engine.stats().tokens_generated_total < 400


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": "8"}, 400, "max_tokens"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
    ],
)
async def test_what_is_wrong_is_named(change: Any, status: int, param: str) -> None:
    async with served(num_pages=256) as (_, client):
        answer: httpx.Response = await client.post("/v1/completions", json=BODY | change)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.asyncio
async def test_many_biases_are_refused_for_their_number() -> None:
    async with served(num_pages=64) as (_, client):
        many = {"logit_bias": dict.fromkeys(map(str, range(1025)), 0.0), "prompt": "a"}
        answer = await client.post("/v1/completions", json=BODY | many)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
    assert "1024" in answer.json()["error"]["message"]


@pytest.mark.asyncio
async def test_an_answer_has_the_form_that_response_format_asks_for() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"model": "pyhelp", "prompt": "json", "max_tokens": 40, "response_format": form}
    async with served(num_pages=64) as (_, client):
        whole = await post(client, "/v1/completions", body)
        events = await post(client, "/v1/completions", body | {"stream": True})
        plain = {"type": "text"}
        await post(client, "/v1/completions", body | {"response_format": plain})
        wrong = body | {"structured_outputs": {"choice": ["a"]}}
        both = await client.post("/v1/completions", json=wrong)
        schema["unevaluatedItems"] = False
        bad = await client.post("/v1/completions", json=body)
    assert json.loads(whole["choices"][0]["text"])["n"] in (1, 2)
    assert json.loads("".join([one["choices"][0]["text"] for one in events]))["n"] in (1, 2)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "structured_outputs")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "response_format")
