"""What a body says for scheduling policies to see: metadata, session and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aioserve import Engine, Observer, RequestInfo
from aioserve.server import ServerSettings
from tests.server.talking import scripted

pytestmark = pytest.mark.asyncio

TURNS = [{"role": "user", "content": "hi"}]
METADATA = {"metadata": {"step": "plan"}}
MORE = {"session_id": "s", "predicted_output_tokens": 7}
CHAT = ("/v1/chat/completions", {"model": "scripted", "messages": TURNS})
RESPONSES = ("/v1/responses", {"model": "scripted", "input": "hi"})
COMPLETIONS = ("/v1/completions", {"model": "scripted", "prompt": ["hi", "ho"], "max_tokens": 2})
EMBEDDINGS = ("/v1/embeddings", {"model": "scripted", "input": ["hi", "ho"]})
MESSAGES = ("/v1/messages", {"model": "scripted", "messages": TURNS, "max_tokens": 9})


class Ears(Observer):
    def __init__(self, engine: Engine) -> None:
        self.heard: list[RequestInfo] = []
        engine.observe(self)

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        self.heard.extend(requests)

    @property
    def told(self) -> list[tuple[Any, ...]]:
        return [(dict(r.metadata), r.session_id, r.predicted_output_tokens) for r in self.heard]


@pytest.mark.parametrize(
    ("to", "more", "told"),
    [
        (CHAT, METADATA | MORE, [({"step": "plan"}, "s", 7)]),
        (CHAT, METADATA | MORE | {"stream": True}, [({"step": "plan"}, "s", 7)]),
        (CHAT, {"metadata": None, "session_id": None}, [({}, None, None)]),
        (RESPONSES, METADATA | MORE, [({"step": "plan"}, "s", 7)]),
        (RESPONSES, {}, [({}, None, None)]),
        (COMPLETIONS, MORE, [({}, "s", 7)] * 2),
        (EMBEDDINGS, {"session_id": "s"}, [({}, "s", None)] * 2),
        (MESSAGES, {"metadata": {"user_id": "me"}}, [({}, None, None)]),
    ],
)
async def test_what_a_body_says_of_itself_is_told_to_whoever_watches(
    to: Any, more: Any, told: Any
) -> None:
    path, body = to
    async with scripted("Rain.") as (engine, client):
        ears = Ears(engine)
        answer = await client.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        assert ears.told == told
        assert {one.tenant for one in ears.heard} == {"me" if to is MESSAGES else None}


async def test_a_response_gives_its_metadata_back_and_a_conversation_doesnt() -> None:
    async with scripted("Rain.") as (_, client):
        answer = await client.post(RESPONSES[0], json=RESPONSES[1] | METADATA)
        assert answer.json()["metadata"] == METADATA["metadata"]
        answer = await client.post(CHAT[0], json=CHAT[1] | METADATA)
        assert "metadata" not in answer.json()


@pytest.mark.parametrize("to", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("settings", "good", "bad", "param"),
    [
        ({}, {str(i): "" for i in range(16)}, {str(i): "" for i in range(17)}, "metadata"),
        ({"max_metadata": 1}, {"a": ""}, {"a": "", "b": ""}, "metadata"),
        ({}, {"k" * 64: ""}, {"k" * 65: ""}, "metadata"),
        ({"max_metadata_key_chars": 1}, {"k": ""}, {"kk": ""}, "metadata"),
        ({}, {"k": "v" * 512}, {"k": "v" * 513}, "metadata.k"),
        ({"max_metadata_value_chars": 1}, {"k": "v"}, {"k": "vv"}, "metadata.k"),
        ({}, {}, {"k": 1}, "metadata[...]"),
        ({}, {}, ["k"], "metadata"),
    ],
)
async def test_metadata_has_the_same_bounds_in_conversations_and_responses(
    to: Any, settings: Any, good: Any, bad: Any, param: str
) -> None:
    path, body = to
    async with scripted("Rain.", settings=ServerSettings(**settings)) as (_, client):
        answer = await client.post(path, json=body | {"metadata": good})
        assert answer.status_code == 200, answer.text
        answer = await client.post(path, json=body | {"metadata": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("to", [CHAT, RESPONSES, COMPLETIONS])
@pytest.mark.parametrize(
    "bad",
    [
        {"session_id": ""},
        {"session_id": "x" * 257},
        {"session_id": 1},
        {"predicted_output_tokens": 0},
        {"predicted_output_tokens": "7"},
        {"predicted_output_tokens": 2**64},
    ],
)
async def test_a_bad_session_or_forecast_is_refused_by_its_name(to: Any, bad: Any) -> None:
    path, body = to
    async with scripted("Rain.") as (_, client):
        answer = await client.post(path, json=body | bad)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == next(iter(bad))


@pytest.mark.parametrize(
    "too_much",
    [
        {"max_metadata": 17},
        {"max_metadata_key_chars": 65},
        {"max_metadata_value_chars": 513},
    ],
)
async def test_settings_allow_no_more_metadata_than_the_engine_takes(too_much: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(too_much))):
        ServerSettings(**too_much)
