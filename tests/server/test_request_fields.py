"""Fields of bodies for scheduling policies: metadata, session, forecast and targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aioserve import Engine, Observer, RequestInfo, RequestView, SchedulingPolicy
from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import scripted

pytestmark = pytest.mark.asyncio

TURNS = [{"role": "user", "content": "hi"}]
METADATA = {"metadata": {"step": "plan"}}
MORE = {"session_id": "s", "predicted_output_tokens": 7}
WHEN = ("ttft", "tpot")
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


@pytest.mark.sampled(1)
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


class Watching(SchedulingPolicy):
    def __init__(self) -> None:
        self.seen: list[tuple[float | None, float | None]] = []

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self.seen.extend((r.ttft_target_seconds, r.tpot_target_seconds) for r in requests)


@pytest.mark.parametrize(
    ("to", "more", "seen"),
    [
        (CHAT, {"ttft_target_seconds": 2, "tpot_target_seconds": 0.25}, [(2, 0.25)]),
        (CHAT, {"ttft_target_seconds": None, "tpot_target_seconds": None}, [(None, None)]),
        (RESPONSES, {"ttft_target_seconds": 0.5}, [(0.5, None)]),
        (COMPLETIONS, {"tpot_target_seconds": 1e-9, "stream": True}, [(None, 1e-9)] * 2),
        (COMPLETIONS, {}, [(None, None)] * 2),
        (EMBEDDINGS, {"ttft_target_seconds": 3.5}, [(3.5, None)] * 2),
    ],
)
async def test_the_policy_sees_the_targets_of_a_body(to: Any, more: Any, seen: Any) -> None:
    path, body = to
    policy = Watching()
    async with scripted("Rain.", policy=policy) as (_, client):
        answer = await client.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        assert policy.seen == seen


async def test_a_response_gives_its_metadata_back_and_a_conversation_doesnt() -> None:
    async with scripted("Rain.") as (_, client):
        answer = await client.post(RESPONSES[0], json=RESPONSES[1] | METADATA)
        assert answer.json()["metadata"] == METADATA["metadata"]
        answer = await client.post(CHAT[0], json=CHAT[1] | METADATA)
        assert "metadata" not in answer.json()


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(6)
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
        {"ttft_target_seconds": "1"},
        {"tpot_target_seconds": True},
    ],
)
async def test_a_bad_session_forecast_or_target_is_refused_by_its_name(to: Any, bad: Any) -> None:
    path, body = to
    async with scripted("Rain.") as (_, client):
        answer = await client.post(path, json=body | bad)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == next(iter(bad))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("to", "field"),
    [
        *((to, f"{when}_target_seconds") for to in (CHAT, RESPONSES, COMPLETIONS) for when in WHEN),
        (EMBEDDINGS, "ttft_target_seconds"),
    ],
)
@pytest.mark.parametrize("bad", [0, -0.5])
async def test_a_target_that_is_past_is_refused_by_name_and_limit(
    to: Any, field: str, bad: float
) -> None:
    path, body = to
    async with scripted("Rain.") as (_, client):
        answer = await client.post(path, json=body | {field: bad})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == field
        assert f"{field} must be a number above 0" in error["message"]
        assert f"got {float(bad)}" in error["message"]


@pytest.mark.parametrize("to", [MESSAGES, EMBEDDINGS])
async def test_a_target_that_an_api_has_no_place_for_is_refused(to: Any) -> None:
    path, body = to
    async with scripted("Rain.") as (_, client):
        answer = await client.post(path, json=body | {"tpot_target_seconds": 1})
        assert answer.status_code == 400
        assert "tpot_target_seconds isn't supported" in answer.json()["error"]["message"]


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


@pytest.mark.sampled(4)
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("POST", "/v1/completions?stream=true", "stream"),
        ("POST", "/v1/completions?n=1&n=2", "n"),
        ("POST", "/v1/messages?beta=true&model=a", "model"),
        ("GET", "/v1/models?limit=1", "limit"),
        ("GET", "/server_info?all=1", "all"),
        ("POST", "/reset_prefix_cache?all=1", "all"),
        ("POST", "/v1/completions?" + "&".join([f"a{n}=" for n in range(4000)]), "a0"),
    ],
)
async def test_nothing_asked_in_a_query_is_missed(method: str, path: str, param: str) -> None:
    body = {"model": "pyhelp", "prompt": "a", "max_tokens": 1}
    async with served() as (_, client):
        answer = await client.request(method, path, json=body if method == "POST" else None)
        assert answer.status_code == 400
        assert param in answer.json()["error"]["message"]
        allowed = await client.post("/v1/completions?api-version=2024-10-21&beta=true", json=body)
        assert allowed.status_code == 200
        assert (await client.get("/health?now=1")).status_code == 200
