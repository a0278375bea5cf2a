"""`/health`, `/ready` and `/version`, over a real socket."""

from __future__ import annotations

from importlib import metadata
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, EngineStats
from aioserve.errors import EngineState
from aioserve.server import ServerSettings, create_app
from aioserve.server.operations import health_of
from aioserve.testing import FakeModel
from tests.server.serving import client_of, served, until


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
            assert (await client.get("/health")).status_code == 200
            async with engine.stream([1, 2, 3]):
                await until(lambda: engine.stats().step_age_seconds > 0.1)
                health = await client.get("/health")
                assert health.status_code == 503
                assert health.json()["status"] == "stalled"
                assert health.json()["step_age_seconds"] > 0.05
                assert health.json()["max_step_age_seconds"] == 0.05
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


STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
