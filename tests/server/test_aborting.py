"""Calls that others end by their ids: their clients hear of it, and their resources are freed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aioserve import Engine
from tests.server.serving import served
from tests.server.talking import ASK, post
from tests.waits import until

pytestmark = pytest.mark.asyncio

LONG: dict[str, Any] = {"model": "pyhelp", "max_tokens": 700, "ignore_eos": True, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", LONG | {"prompt": ["a", "b"], "n": 2}),
    "chat": ("/v1/chat/completions", LONG | {"messages": ASK}),
    "response": (
        "/v1/responses",
        {
            "model": "pyhelp",
            "max_output_tokens": 700,
            "ignore_eos": True,
            "temperature": 0,
            "input": "Go on.",
        },
    ),
}


def is_free(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats.num_running or stats.num_waiting or stats.pages_held_by_requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_the_call_of_an_id_ends_with_an_error_and_others_go_on(
    name: str, stream: bool
) -> None:
    path, body = BODIES[name]
    async with served(num_pages=512) as (engine, client):
        short = LONG | {"prompt": "c", "max_tokens": 60}
        alone = await post(client, "/v1/completions", short)
        headers = {"x-request-id": "mine"}
        call = asyncio.create_task(
            client.post(path, json=body | {"stream": stream}, headers=headers)
        )
        wanted = engine.stats().tokens_generated_total + 20
        await until(lambda: engine.stats().tokens_generated_total >= wanted)
        other = asyncio.create_task(post(client, "/v1/completions", short))
        ended = await post(client, "/abort_requests", {"request_ids": ["mine", "unknown"]})
        answer = await call
        assert (await other)["choices"] == alone["choices"]
        assert (await post(client, "/abort_requests", {"request_ids": ["mine"]})) == {"aborted": 0}
        await until(lambda: is_free(engine))
    assert ended == {"aborted": 1}
    assert answer.status_code == (200 if stream else 409)
    last = json.loads(answer.text.rsplit("data: ", 1)[1]) if stream else answer.json()
    assert last["error"]["code"] == "request_aborted"
    assert "ended by an abort" in last["error"]["message"]
    assert "[DONE]" not in answer.text


async def test_ids_of_bodies_serve_as_well_and_so_does_all() -> None:
    async with served(num_pages=512, max_num_seqs=1) as (engine, client):
        path, body = BODIES["chat"]
        for asked, count in (
            ({"rid": "one"}, 1),
            ({"rid": "nobody"}, 0),
            ({"abort_all": True}, 2),
        ):
            calls = [
                asyncio.create_task(client.post(path, json=body | {"rid": name}))
                for name in ("one", "two")
            ]
            await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
            assert await post(client, "/abort_request", asked) == {"aborted": count}
            await post(client, "/abort_request", {"abort_all": True})
            answers = await asyncio.gather(*calls)
            assert {one.json()["error"]["code"] for one in answers} == {"request_aborted"}
            await until(lambda: is_free(engine))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {}),
        ("/abort_request", {"rid": "a", "abort_all": True}),
        ("/abort_requests", {}),
        ("/abort_requests", {"request_ids": "a"}),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any]) -> None:
    async with served(num_pages=64) as (_, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("rid", "request_ids")
