"""Log-probabilities in the items of `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import post

pytestmark = pytest.mark.asyncio

PATH = "/v1/responses"
BODY: dict[str, Any] = {
    "model": "pyhelp",
    "input": "How is JSON read?",
    "seed": 3,
    "max_output_tokens": 12,
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
}


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(one.partition("data: ")[2]) for one in text.split("\n\n") if one]


def rounded(entries: list[dict[str, Any]]) -> list[Any]:
    """Entries with rounded log-probabilities: batches of other sizes add in another order."""
    return [
        (one["token"], one["bytes"], round(one["logprob"], 3), len(one["top_logprobs"]))
        for one in entries
    ]


@pytest.mark.parametrize("top", [0, 2])
async def test_a_text_has_those_of_its_tokens_whole_and_in_pieces(top: int) -> None:
    async with served(num_pages=256) as (_, client):
        body = BODY | {"top_logprobs": top}
        whole = await post(client, PATH, body)
        chat = {"messages": [{"role": "user", "content": BODY["input"]}], "logprobs": True}
        more = {"model": "pyhelp", "seed": 3, "max_tokens": 12, "ignore_eos": True}
        said = await post(client, "/v1/chat/completions", chat | more | {"top_logprobs": top})
        streamed = await client.post(PATH, json=body | {"stream": True})
        stored = (await client.get(f"{PATH}/{whole['id']}")).json()
        plain = await post(client, PATH, BODY | {"include": []})
    (part,) = whole["output"][0]["content"]
    assert whole["top_logprobs"] == top
    expected = said["choices"][0]["logprobs"]["content"]
    assert rounded(part["logprobs"]) == rounded(expected[: len(part["logprobs"])])
    assert "".join([one["token"] for one in part["logprobs"]]) == part["text"]
    assert stored["output"] == whole["output"]
    assert plain["output"][0]["content"] == [part | {"logprobs": []}]

    events = events_of(streamed.text)
    told = {event["type"]: event for event in events}
    deltas = [
        one
        for event in events
        if event["type"] == "response.output_text.delta"
        for one in event["logprobs"]
    ]
    done = told["response.output_text.done"]["logprobs"]
    ended = told["response.incomplete"]["response"]["output"][0]["content"][0]
    assert deltas == done == ended["logprobs"]
    assert told["response.content_part.done"]["part"] == ended
    assert rounded(done) == rounded(part["logprobs"])


async def test_a_conversation_goes_on_without_them() -> None:
    async with served(num_pages=256) as (_, client):
        first = await post(client, PATH, BODY | {"top_logprobs": 1})
        after = {"previous_response_id": first["id"], "input": "More."}
        second = await post(client, PATH, BODY | after)
        third = await post(client, PATH, BODY | after | {"previous_response_id": second["id"]})
        given = [{"role": "user", "content": BODY["input"]}, *first["output"]]
        again = await post(
            client, PATH, BODY | {"input": [*given, {"role": "user", "content": "More."}]}
        )
    assert second["output"][0]["content"][0]["logprobs"]
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]


async def test_what_is_wrong_is_named() -> None:
    async with served(ServerSettings(max_top_logprobs=3), num_pages=64) as (_, client):
        await post(client, PATH, BODY | {"top_logprobs": 3})
        await post(client, PATH, BODY | {"include": [], "top_logprobs": 0})
        for wrong in (
            {"top_logprobs": 4},
            {"top_logprobs": -1},
            {"include": [], "top_logprobs": 1},
        ):
            answer = await client.post(PATH, json=BODY | wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "top_logprobs"), error
