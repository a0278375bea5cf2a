"""`/health`, `/ready` and `/version`, over a real socket."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, EngineStats, SamplingParams
from aioserve.errors import EngineState
from aioserve.server import ServerSettings, create_app
from aioserve.server.operations import health_of
from aioserve.testing import FakeModel
from tests.server.serving import client_of, served
from tests.server.talking import post
from tests.waits import until


@pytest.mark.asyncio
async def test_an_idle_server_is_healthy_and_ready_and_says_its_version() -> None:
    async with served(num_pages=64) as (_, client):
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ok"
        assert health.json()["step_age_seconds"] == 0
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "engine": "open"})
        shown = (await client.get("/version")).json()
        assert shown == {"version": metadata.version("aioserve")}


@pytest.mark.asyncio
async def test_a_step_that_doesnt_end_shows_in_health_alone() -> None:
    async with Engine(FakeModel(step_seconds=lambda _: 0.4)) as engine:
        app = create_app(engine, ServerSettings(max_step_age_seconds=0.05))
        async with client_of(app) as client:

            async def stalled() -> dict[str, Any] | None:
                health = await client.get("/health")
                return health.json() if health.status_code == 503 else None

            assert (await client.get("/health")).status_code == 200
            async with engine.stream([1, 2, 3], SamplingParams(max_tokens=1000, ignore_eos=True)):
                # It is healthy between the end of a step and the next stall.
                told = await until(stalled)
                assert told["status"] == "stalled"
                assert told["step_age_seconds"] > 0.05
                assert told["max_step_age_seconds"] == 0.05
                assert (await client.get("/ready")).status_code == 200


@pytest.mark.asyncio
async def test_an_engine_that_has_failed_is_neither_healthy_nor_ready() -> None:
    async with Engine(FakeModel()) as engine, client_of(create_app(engine)) as client:
        with pytest.MonkeyPatch.context() as patch:

            def broken(*_: object) -> None:
                raise RuntimeError("planted")

            patch.setattr("aioserve.engine.delivery.Delivery.deliver", broken)
            body = {"model": "fake", "prompt": [1, 2], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 500
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["engine"]) == (503, "failed")
        assert (await client.get("/health")).json()["status"] == "failed"


@given(
    state=st.sampled_from(get_args(EngineState)),
    age=st.floats(0, 100),
    limit=st.floats(0.001, 100),
)
def test_health_is_ok_exactly_where_an_engine_serves_and_its_step_is_young(
    state: EngineState, age: float, limit: float
) -> None:
    stats = msgspec.structs.replace(STATS, step_age_seconds=age)
    found = health_of(state, stats, limit)
    assert (found.status == "ok") == (state in ("open", "draining") and age < limit)
    assert (found.engine, found.step_age_seconds) == (state, age)


ZEROS: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
ZEROS |= {"tokens_drafted_total": (), "tokens_accepted_total": ()}
STATS = EngineStats(**ZEROS)


@pytest.mark.asyncio
async def test_a_ping_is_answered_as_health_is() -> None:
    async with served(num_pages=64) as (_, client):
        ping, health = await client.get("/ping"), await client.get("/health")
    assert (ping.status_code, ping.json().keys()) == (200, health.json().keys())


@pytest.mark.asyncio
async def test_the_server_says_how_it_is_set_up() -> None:
    async with served(num_pages=64, max_num_seqs=3) as (engine, client):
        info = (await client.get("/server_info")).json()
    assert info["engine"]["max_num_seqs"] == 3
    assert info["max_model_len"] == engine.limits.max_model_len
    assert (info["models"], info["num_pages"], info["state"]) == (["pyhelp"], 64, "open")


@pytest.mark.asyncio
async def test_cached_prefixes_are_forgotten_when_it_is_asked() -> None:
    body = {"model": "pyhelp", "prompt": "The json module " * 20, "max_tokens": 4, "seed": 1}
    async with served(num_pages=256) as (engine, client):
        first = await post(client, "/v1/completions", body)
        again = await post(client, "/v1/completions", body)
        cached = engine.stats().pages_cached
        reset = await client.post("/reset_prefix_cache")
        assert reset.json() == {"pages": cached}
        assert engine.stats().pages_cached == 0
        anew = await post(client, "/v1/completions", body)
        assert (await client.post("/reset_prefix_cache")).json()["pages"] > 0
        assert (await client.post("/reset_prefix_cache")).json() == {"pages": 0}
        assert (await client.post("/reset_prefix_cache", json={"all": True})).status_code == 400
    answers = (first, again, anew)
    counts = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert counts[0] == counts[2] == 0 < counts[1]
    assert first["choices"] == again["choices"] == anew["choices"]


@pytest.mark.asyncio
async def test_a_reset_takes_nothing_from_those_that_run() -> None:
    body = {"model": "pyhelp", "prompt": "The json module", "max_tokens": 60, "ignore_eos": True}
    async with served(num_pages=256) as (engine, client):
        alone = await post(client, "/v1/completions", body)
        running = asyncio.ensure_future(post(client, "/v1/completions", body))
        for _ in range(20):
            assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert (await running)["choices"] == alone["choices"]
        assert not engine.stats().pages_held_by_requests


@pytest.mark.asyncio
async def test_operators_alone_see_the_setup_and_reset_the_cache() -> None:
    keys = {"one": "a-secret-of-the-first", "two": "a-secret-of-the-second"}
    settings = ServerSettings(api_keys=keys, operators=["two"])
    async with served(settings, num_pages=64) as (_, client):
        for name, status in (("one", 403), ("two", 200)):
            headers = {"authorization": f"Bearer {keys[name]}"}
            info = await client.get("/server_info", headers=headers)
            reset = await client.post("/reset_prefix_cache", headers=headers)
            assert (info.status_code, reset.status_code) == (status, status)
            for path, body in (("s", {"request_ids": []}), ("", {"abort_all": True})):
                ended = await client.post(f"/abort_request{path}", json=body, headers=headers)
                assert ended.status_code == status
        assert (await client.get("/ping")).status_code == 200
