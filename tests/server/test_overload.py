"""Answers of an overloaded server, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, Refusal, RequestInfo, hookimpl
from aioserve.errors import QueueFullError, RequestRejectedError
from aioserve.server import create_app
from aioserve.server.errors import api_error_of
from aioserve.testing import FakeModel
from tests.server.serving import client_of
from tests.waits import until

BODY: dict[str, Any] = {"model": "fake", "prompt": [1] * 10, "max_tokens": 200}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "named"),
    [({"max_waiting": 2}, "max_waiting"), ({"max_waiting_tokens": 20}, "max_waiting_tokens")],
)
async def test_a_full_queue_is_503_and_says_when_to_try_again(
    options: dict[str, Any], named: str
) -> None:
    model = FakeModel(step_seconds=lambda _: 0.002)
    async with (
        Engine(model, max_num_seqs=1, **options) as engine,
        client_of(create_app(engine)) as client,
    ):
        calls = []
        for _ in range(3):  # one runs, and two wait
            calls.append(asyncio.create_task(client.post("/v1/completions", json=BODY)))
            await until(lambda: engine.stats().tokens_generated_total)
        await until(lambda: engine.stats().num_waiting == 2)
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert named in answer.json()["error"]["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert (await client.get("/ready")).status_code == 200
        for call in calls:
            call.cancel()


@pytest.mark.asyncio
async def test_a_deadline_that_cant_be_met_is_503_at_once() -> None:
    model = FakeModel(step_seconds=lambda _: 0.005)
    async with (
        Engine(model, max_num_seqs=1, refuse_late=True) as engine,
        client_of(create_app(engine)) as client,
    ):
        await client.post("/v1/completions", json=BODY | {"max_tokens": 10})
        calls = []
        for _ in range(3):
            calls.append(asyncio.create_task(client.post("/v1/completions", json=BODY)))
        await until(lambda: engine.stats().num_waiting == 2)
        hurried = await client.post("/v1/completions", json=BODY | {"deadline_seconds": 0.001})
        assert hurried.status_code == 503
        assert "deadline_seconds" in hurried.json()["error"]["message"]
        for call in calls:
            call.cancel()


class Closed:
    @hookimpl
    def aioserve_admit(self, request: RequestInfo) -> Refusal:
        return Refusal("closed on Sundays", retry_after_seconds=86_400)


@pytest.mark.asyncio
async def test_a_plugins_refusal_is_429_with_its_own_time() -> None:
    async with (
        Engine(FakeModel(), plugins=[Closed()]) as engine,
        client_of(create_app(engine)) as client,
    ):
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "86400"
    assert "closed on Sundays" in answer.json()["error"]["message"]


@given(seconds=st.none() | st.floats(0, 1e9))
def test_an_estimate_is_told_within_bounds_and_a_plugins_word_as_it_is(
    seconds: float | None,
) -> None:
    full = api_error_of(QueueFullError("full", retry_after_seconds=seconds))
    assert full.status == 503
    assert 1 <= int(full.headers["retry-after"]) <= 60
    if seconds is not None and 1 <= seconds <= 60:
        assert seconds <= int(full.headers["retry-after"]) < seconds + 1
    rejected = api_error_of(RequestRejectedError("no", retry_after_seconds=seconds))
    assert rejected.status == 429
    assert int(rejected.headers["retry-after"]) >= max(1, seconds or 0)
