"""Prompts in answers: ids, log-probabilities, and the text that an answer continues."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import SamplingParams
from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import (
    ASK,
    CHAT_BODY,
    TOOLS,
    chat_joined,
    chat_whole,
    post,
    scripted,
)

pytestmark = pytest.mark.asyncio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN: dict[str, Any] = {"model": "pyhelp", "seed": 3, "max_tokens": 6}
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "import json"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("top", [0, 2])
async def test_log_probabilities_of_the_prompt_are_those_of_the_engine(path: str, top: int) -> None:
    async with served(num_pages=256) as (engine, client):
        body = PLAIN | ASKED[path] | {"prompt_logprobs": top}
        answer = await post(client, path, body)
        plain = await post(client, path, PLAIN | ASKED[path])
        as_ids = await post(client, path, body | {"return_tokens_as_token_ids": True})
        ids = await engine.encode(ASK if path == CHAT else "import json")
        params = SamplingParams(max_tokens=1, prompt_logprobs=top)
        expected = (await engine.generate(ids, params)).prompt_logprobs or ()
        text_of = engine.tokenizer.token_text
    holder = answer if path == CHAT else answer["choices"][0]
    told = holder.pop("prompt_logprobs")
    assert answer["choices"] == plain["choices"]
    assert told[0] is None
    assert len(told) == len(ids)
    for token_id, place, one in zip(ids[1:], told[1:], expected[1:], strict=True):
        assert one is not None
        assert set(place) == {str(token_id), *[str(each.id) for each in one.top]}
        assert place[str(token_id)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        ranks = {str(each.id): rank for rank, each in enumerate(one.top, 1)}
        for name, each in place.items():
            assert (each["rank"], each["decoded_token"]) == (ranks.get(name), text_of(int(name)))
    named = (as_ids if path == CHAT else as_ids["choices"][0])["prompt_logprobs"]
    assert {one["decoded_token"] for one in named[1].values()} == {
        f"token_id:{name}" for name in named[1]
    }


async def test_echo_and_prompt_logprobs_tell_as_many_as_each_asks_for() -> None:
    async with served(num_pages=256) as (_, client):
        body = PLAIN | ASKED[COMPLETIONS] | {"echo": True, "n": 2}
        (one, other) = (await post(client, COMPLETIONS, body | {"logprobs": 1}))["choices"]
        many = body | {"logprobs": 1, "prompt_logprobs": 3}
        (both, second) = (await post(client, COMPLETIONS, many))["choices"]
    assert both.pop("prompt_logprobs") == second.pop("prompt_logprobs")
    for here, there in ((one, both), (other, second)):
        assert here["logprobs"]["tokens"] == there["logprobs"]["tokens"]
        assert list(map(_names, here["logprobs"]["top_logprobs"])) == list(
            map(_names, there["logprobs"]["top_logprobs"])
        )


def _names(top: dict[str, float] | None) -> list[str] | None:
    return None if top is None else sorted(top)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_log_probabilities_of_prompts_are_limited_and_not_streamed(path: str) -> None:
    async with served(ServerSettings(max_top_logprobs=3), num_pages=64) as (_, client):
        await post(client, path, PLAIN | ASKED[path] | {"prompt_logprobs": 3})
        for wrong in (
            {"prompt_logprobs": 4},
            {"prompt_logprobs": -1},
            {"prompt_logprobs": 1, "stream": True},
        ):
            answer = await client.post(path, json=PLAIN | ASKED[path] | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "prompt_logprobs"), error


async def test_ids_of_a_conversation_come_once() -> None:
    async with scripted("Rain.") as (engine, client):
        body = CHAT_BODY | {"return_token_ids": True, "n": 2}
        answer = await post(client, CHAT, body)
        for more in ({}, {"stream_options": {"include_usage": True}}):
            events = await post(client, CHAT, body | {"stream": True} | more)
            told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
            assert told == [answer["prompt_token_ids"]]
            assert "prompt_token_ids" in events[0]
            assert chat_joined(events) == chat_whole(answer)
        plain = await post(client, CHAT, CHAT_BODY)
        assert answer["prompt_token_ids"] == await engine.encode(ASK)
    assert "prompt_token_ids" not in plain


GO_ON = {"continue_final_message": True, "add_generation_prompt": False}
ECHOED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([*ASK, {"role": "assistant", "content": "Once "}], GO_ON, "Once "),
    ([*ASK, {"role": "assistant", "content": "Once "}], {}, "Once "),
    (
        [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "On"}] * 2}],
        {"tools": TOOLS},
        "On\nOn",
    ),
    (ASK, {}, ""),
]


@pytest.mark.parametrize(("messages", "more", "echoed"), ECHOED)
async def test_an_answer_begins_with_the_last_message_if_it_is_the_assistants(
    messages: list[dict[str, Any]], more: dict[str, Any], echoed: str
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with scripted("more", call) as (_, client):
        body = CHAT_BODY | {"messages": messages, "n": 2} | more
        plain = chat_whole(await post(client, CHAT, body))
        whole = chat_whole(await post(client, CHAT, body | {"echo": True}))
        options = {"include_usage": True, "continuous_usage_stats": True}
        for stream in ({"stream": True}, {"stream": True, "stream_options": options}):
            events = await post(client, CHAT, body | {"echo": True} | stream)
            assert chat_joined(events) == whole
    for index, choice in plain.items():
        assert whole[index] == choice | {"content": echoed + choice["content"]}


async def test_a_call_that_must_be_made_stands_beside_the_echoed_text() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    last = {"role": "assistant", "content": "Once"}
    async with served(num_pages=256) as (_, client):
        for choice in ("required", named):
            body = PLAIN | {"messages": [*ASK, last], "max_tokens": 60, "temperature": 0}
            body |= {"tools": TOOLS, "tool_choice": choice, "echo": True}
            whole = chat_whole(await post(client, CHAT, body))
            events = await post(client, CHAT, body | {"stream": True})
            assert chat_joined(events) == whole
            assert whole[0]["content"] == "Once"
            assert whole[0]["calls"]
